"""One router drains an engine that gives each event only once, and relays the events to the other routers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

MOST_KEPT, MOST_KEPT_BYTES = 10_000, 16 << 20
"""Drains kept in each channel, for late readers: a busy engine of 10,000 tokens a second fills some 300 KB in each."""

_MOST_WAITING = 1_000


class RelayForgot(ConnectionError):
    """The channel was reset, perhaps with smaller positions and tokens: read it from its beginning."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A payload drained by the holder of lease `token`, and its position in the channel.

    Tokens grow with each new holder: a lower one comes from an earlier holder.
    """

    token: int
    payload: bytes
    position: str


class Relay(Protocol):
    """The holder of a channel's lease publishes, and all routers read, the holder itself included.

    Raises OSError (ConnectionError) if the relay cannot be reached, and RelayForgot from `hear`.
    """

    async def claim(self, channel: str, owner: str, ttl_s: float) -> int | None:
        """Take or keep the lease for `ttl_s` more seconds; returns its token, or None if another router has it."""
        ...

    async def release(self, channel: str, owner: str) -> None:
        """Give the lease up, if `owner` has it."""
        ...

    async def publish(self, channel: str, token: int, payload: bytes) -> None:
        """Append a payload drained by the holder of `token`; readers get payloads in this order."""
        ...

    def hear(self, channel: str, *, after: str | None = None) -> AsyncIterator[Relayed]:
        """Payloads after position `after` that are still kept, then new ones, without end."""
        ...

    async def close(self) -> None:
        """Close connections."""
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
    """A relay inside one process: enough for a single router."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._channels: dict[str, _Channel] = {}

    def __repr__(self) -> str:
        return f"<MemoryRelay, {len(self._channels)} channels>"

    async def claim(self, channel: str, owner: str, ttl_s: float) -> int | None:
        lease, now = self._channels.setdefault(channel, _Channel()), self._clock()
        if lease.owner != owner:
            if lease.owner is not None and now < lease.expires_at:
                return None
            lease.owner, lease.token = owner, lease.token + 1
        lease.expires_at = now + ttl_s
        return lease.token

    async def release(self, channel: str, owner: str) -> None:
        lease = self._channels.setdefault(channel, _Channel())
        if lease.owner == owner:
            lease.owner = None

    async def publish(self, channel: str, token: int, payload: bytes) -> None:
        """See Relay. A reader that is too far behind misses payloads, and notices by the numbers."""
        there = self._channels.setdefault(channel, _Channel())
        there.published += 1
        relayed = Relayed(token, payload, str(there.published))
        there.keep(relayed)
        for queue in there.hearers:
            if not queue.full():
                queue.put_nowait(relayed)

    async def hear(self, channel: str, *, after: str | None = None) -> AsyncIterator[Relayed]:
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
        """Nothing is done here."""
