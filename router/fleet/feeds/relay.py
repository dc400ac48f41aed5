"""Who drains an engine that tells each event only once, and how the other routers hear of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

MOST_KEPT, MOST_KEPT_BYTES = 10_000, 16 << 20
"""Of each channel, for whoever comes late: a busy engine of 10,000 tokens a second drains some 300 KB in each."""

_MOST_WAITING = 1_000


class RelayForgot(ConnectionError):
    """The channel begins anew, perhaps with smaller positions and tokens: hear it from its beginning."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """What the holder of lease `token` drained, and where in the channel that stands.

    Tokens grow with each new holder: a lower one comes from a former.
    """

    token: int
    payload: bytes
    position: str


class Relay(Protocol):
    """One holder of a channel's lease publishes, and all hear, the holder itself included.

    Raises OSError (ConnectionError) when it is out of reach, and RelayForgot from `hear`.
    """

    async def claim(self, channel: str, owner: str, ttl_s: float) -> int | None:
        """Take or keep the lease for `ttl_s` more seconds; its token, or None while somebody else has it."""
        ...

    async def release(self, channel: str, owner: str) -> None:
        """Give the lease up, if `owner` has it."""
        ...

    async def publish(self, channel: str, token: int, payload: bytes) -> None:
        """Let everyone hear what the holder of `token` drained, in the order of publishing."""
        ...

    def hear(self, channel: str, *, after: str | None = None) -> AsyncIterator[Relayed]:
        """What was published behind position `after` and is still kept, then what will be, without end."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(slots=True)
class _Channel:
    owner: str | None = None
    expires_at: float = 0.0
    token: int = 0
    published: int = 0
    kept: deque[Relayed] = field(default_factory=deque)
    kept_bytes: int = 0
    hearers: set[asyncio.Queue[Relayed]] = field(default_factory=set)

    def keep(self, relayed: Relayed) -> None:
        self.kept.append(relayed)
        self.kept_bytes += len(relayed.payload)
        while len(self.kept) > MOST_KEPT or (self.kept_bytes > MOST_KEPT_BYTES and len(self.kept) > 1):
            self.kept_bytes -= len(self.kept.popleft().payload)


class MemoryRelay:
    """A relay for routers of one process: all that a single router needs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._channels: dict[str, _Channel] = {}

    def __repr__(self) -> str:
        return f"<MemoryRelay, {len(self._channels)} channels>"

    async def claim(self, channel: str, owner: str, ttl_s: float) -> int | None:
        """See Relay."""
        lease, now = self._channels.setdefault(channel, _Channel()), self._clock()
        if lease.owner != owner:
            if lease.owner is not None and now < lease.expires_at:
                return None
            lease.owner, lease.token = owner, lease.token + 1
        lease.expires_at = now + ttl_s
        return lease.token

    async def release(self, channel: str, owner: str) -> None:
        """See Relay."""
        lease = self._channels.setdefault(channel, _Channel())
        if lease.owner == owner:
            lease.owner = None

    async def publish(self, channel: str, token: int, payload: bytes) -> None:
        """See Relay. A hearer that is too far behind misses it, and sees so by the numbers."""
        there = self._channels.setdefault(channel, _Channel())
        there.published += 1
        relayed = Relayed(token, payload, str(there.published))
        there.keep(relayed)
        for queue in there.hearers:
            if not queue.full():
                queue.put_nowait(relayed)

    async def hear(self, channel: str, *, after: str | None = None) -> AsyncIterator[Relayed]:
        """See Relay."""
        there = self._channels.setdefault(channel, _Channel())
        queue: asyncio.Queue[Relayed] = asyncio.Queue(_MOST_WAITING)
        there.hearers.add(queue)
        try:
            for relayed in tuple(there.kept):
                if after is None or int(relayed.position) > int(after):
                    yield relayed
            while True:
                yield await queue.get()
        finally:
            there.hearers.discard(queue)

    async def close(self) -> None:
        """See Relay."""
