"""Base class of streamed answers that end with a last event. Pure but for their own memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar

from backends.http.halves import Halves
from backends.http.nonsense import MISSHAPEN, nonsense
from backends.http.sse import SseDecoder
from policies.errors import BackendErred
from policies.nouns import Delta


class EventAnswer(ABC):
    """Fed with the body of a 200, server-sent events. A kind defines the meaning of each (`_read`), and the last one.

    Bytes after the last event are ignored. `last_word` names that event, for messages.
    """

    last_word: ClassVar[str]

    def __init__(self, backend: str) -> None:
        self.is_over = False
        self._backend, self._events, self._halves = backend, SseDecoder(), Halves()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._backend}: {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The Deltas in `data`. Raises BackendFailed at nonsense, and the error of an error event."""
        for event in self._events.feed(data):
            if self.is_over:
                return
            yield from self.hear(self._halves.joined(event.data))

    def hear(self, data: bytes) -> list[Delta]:
        """The Deltas of one event with `data`. Raises as `feed` does."""
        try:
            deltas = list(self._read(data))
            for delta in deltas:
                if delta.text.__class__ is not str:
                    raise TypeError(f"a text is a {type(delta.text).__name__}")
            return deltas
        except MISSHAPEN as error:
            raise nonsense(self._backend, data) from error

    def end(self) -> Iterator[Delta]:
        """Nothing more. Raises BackendFailed if the end came too early."""
        if not self.is_over:
            raise BackendErred(f"{self._backend} ended its stream without {self.last_word}")
        return iter(())

    @abstractmethod
    def _read(self, data: bytes) -> Iterable[Delta]:
        """The Deltas of one event; sets `is_over` at the last. Raises the error of an error event, and MISSHAPEN."""
