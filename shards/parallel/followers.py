"""The other processes of a shard, as the first one commands them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from shards.parallel.collectives import WAITS_S
from shards.parallel.link import LinkBroken, PartLink
from shards.parallel.orders import Answer, Orders

_SLACK_S = 30.0


class Followers:
    """Sends orders through `links`, one to each other process, which obeys them in that order.

    `late_at_s` is when the call in progress must have ended, on `clock`: None between calls.
    """

    def __init__(self, links: Sequence[PartLink], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._links, self._clock = links, clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode
        self.late_at_s: float | None = None

    def __repr__(self) -> str:
        return f"Followers({len(self._links)} others)"

    def send(self, order: Orders) -> None:
        """Have all others obey `order`. Raises LinkBroken."""
        message = self._encode(order)
        for link in self._links:
            link.send(message)

    def answers(self) -> list[int]:
        """Wait for the answer of each other process. Raises ValueError with its error, LinkBroken if it ended."""
        answers = [self._answer(link) for link in self._links]
        for answer in answers:
            if answer.error:
                raise ValueError(answer.error)
        return [answer.value for answer in answers]

    @contextmanager
    def limited(self) -> Iterator[None]:
        """A call that all processes make together, and that may last a few seconds."""
        self.late_at_s = self._clock() + WAITS_S + _SLACK_S
        try:
            yield
        finally:
            self.late_at_s = None

    @property
    def is_late(self) -> bool:
        """Whether a call should have ended long ago."""
        late_at_s = self.late_at_s
        return late_at_s is not None and self._clock() > late_at_s

    def close(self) -> None:
        """End all connections: the other processes end."""
        for link in self._links:
            link.close()

    def _answer(self, link: PartLink) -> Answer:
        message = link.receive()
        if message is None:
            raise LinkBroken("another process of this shard has ended; its last lines on stderr say why")
        return self._decode(message)
