"""The stream in Redis or Valkey through which routers hear of each other. Redis 6.2 or newer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from router.store.base import Fault, StoreFailed
from router.store.redis import MUTE_S, faults

START = "0-0"
"""Before everything that a stream can hold."""

MOST_ENTRIES = 20_000
"""About how many entries the stream keeps. Each has at most about 100 KiB, mostly a few."""

AT_ONCE = 64
"""Entries that are read in one go."""

_KEPT_S = 3600
"""A stream that nobody writes to any more goes after so long."""


class Told(NamedTuple):
    """One entry: `number` is its place in the stream, `at_ms` when it was written on the server's clock."""

    number: str
    at_ms: int
    by: str
    payload: bytes


class Exchanged(NamedTuple):
    """What was read, oldest first, and why what was to be written may not have been; None: it was."""

    told: Sequence[Told]
    unwritten: StoreFailed | None = None


class Stream(Protocol):
    """Carries what routers tell each other. Everything but `close` may raise StoreFailed."""

    async def state(self) -> tuple[int, str]:
        """Its time, in ms, and the number of its newest entry, START if there is none."""
        ...

    async def exchange(self, payloads: Sequence[bytes], after: str) -> Exchanged:
        """Write `payloads` and read what follows `after`, AT_ONCE entries at most."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class RedisStream:
    """A stream at `url`, on one connection. `by` is the name of who writes. It knows no deadline and does not retry."""

    def __init__(self, url: str, by: str, *, key: str = "pointsman:replicas", most: int = MOST_ENTRIES) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=MUTE_S, socket_connect_timeout=MUTE_S
        )
        self._by, self._key, self._most = by, key, most

    def __repr__(self) -> str:
        return f"<RedisStream {self._key}>"

    async def state(self) -> tuple[int, str]:
        """See Stream."""
        async with self._line() as pipe:
            pipe.time()
            pipe.xrevrange(self._key, count=1)
            (seconds, micros), newest = await pipe.execute()
            number = newest[0][0].decode() if newest else START
            _place(number)
            return seconds * 1000 + micros // 1000, number

    async def exchange(self, payloads: Sequence[bytes], after: str) -> Exchanged:
        """See Stream. One round trip."""
        async with self._line() as pipe:
            for payload in payloads:
                entry: dict[Any, Any] = {"by": self._by, "news": payload}
                pipe.xadd(self._key, entry, maxlen=self._most, approximate=True)
            pipe.expire(self._key, _KEPT_S)
            pipe.xread({self._key: after}, count=AT_ONCE)
            *written, _, read = await pipe.execute(raise_on_error=False)
            if isinstance(read, Exception):
                raise read
            told = [_entry(number.decode(), fields) for _, entries in read or () for number, fields in entries]
            return Exchanged(told, _unwritten(written))

    async def close(self) -> None:
        """See Stream."""
        await self._redis.aclose()

    @asynccontextmanager
    async def _line(self) -> AsyncIterator[Any]:
        """A pipeline whose failures, and whatever is wrong with its answers, are StoreFailed."""
        try:
            with faults():
                async with self._redis.pipeline(transaction=False) as pipe:
                    yield pipe
        except StoreFailed:
            await self._hang_up()
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            await self._hang_up()
            raise StoreFailed(Fault.NONSENSE, f"it answers otherwise than Redis: {error}") from error

    async def _hang_up(self) -> None:
        # what still comes on this connection answers questions of the past
        await self._redis.connection_pool.disconnect()


def is_after(number: str, other: str) -> bool:
    """Was the entry `number` written after `other`?"""
    return _place(number) > _place(other)


def _place(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split("-"))


def _entry(number: str, fields: Any) -> Told:
    # an entry that is not ours is for its reader to refuse: the next one may be
    by, news = fields.get(b"by", b""), fields.get(b"news", b"")
    return Told(number, _place(number)[0], by.decode(errors="replace"), news)


def _unwritten(written: Sequence[Any]) -> StoreFailed | None:
    try:
        with faults():
            for reply in written:
                if isinstance(reply, Exception):
                    raise reply
    except StoreFailed as failure:
        return failure
    return None
