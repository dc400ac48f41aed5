"""The stream in Redis or Valkey through which routers hear of each other. Redis 6.2 or newer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from router.shared.replicas.line import KEPT_S, RedisLine
from router.shared.store.base import StoreFailed
from router.shared.store.redis import faults

START = "0-0"
"""Before everything that a stream can hold."""

MOST_ENTRIES = 20_000
"""About how many entries the stream keeps. Each has at most about 100 KiB, mostly a few."""

AT_ONCE = 64
"""Entries that are read in one go."""


class Told(NamedTuple):
    """One entry: `number` is its place in the stream, `at_ms` when it was written on the server's clock."""

    number: str
    at_ms: int
    by: str
    payload: bytes


class Standing(NamedTuple):
    """What the stream has: numbers of its `oldest` and `newest` entry, START if there is none.

    `is_cut`: older ones had to go.
    """

    oldest: str = START
    newest: str = START
    is_cut: bool = False

    def lacks(self, after: str) -> bool:
        """Is any of what came after `after` missing, or may be?"""
        return is_after(after, self.newest) or (self.is_cut and is_after(self.oldest, after))


class Exchanged(NamedTuple):
    """What was read, oldest first, at `now_ms` on the server's clock, and why what was to be written may not have been;
    None: it was."""

    told: Sequence[Told]
    now_ms: int
    unwritten: StoreFailed | None = None


class Stream(Protocol):
    """Carries what routers tell each other. Everything but `close` may raise StoreFailed."""

    async def state(self) -> Standing:
        """What it has now."""
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
        self._line, self._by, self._key, self._most = RedisLine(url), by, key, most

    def __repr__(self) -> str:
        return f"<RedisStream {self._key}>"

    async def state(self) -> Standing:
        """See Stream."""
        async with self._line.pipe() as pipe:
            pipe.xrange(self._key, count=1)
            pipe.xrevrange(self._key, count=1)
            pipe.xlen(self._key)
            *ends, length = await pipe.execute()
            oldest, newest = (end[0][0].decode() if end else START for end in ends)
            _place(oldest), _place(newest)
            # it is cut to so many or a few more, never to fewer
            return Standing(oldest, newest, length >= self._most)

    async def exchange(self, payloads: Sequence[bytes], after: str) -> Exchanged:
        """See Stream. One round trip."""
        async with self._line.pipe() as pipe:
            for payload in payloads:
                entry: dict[Any, Any] = {"by": self._by, "news": payload}
                pipe.xadd(self._key, entry, maxlen=self._most, approximate=True)
            pipe.expire(self._key, KEPT_S)
            pipe.xread({self._key: after}, count=AT_ONCE)
            pipe.time()
            *written, _, read, time = await pipe.execute(raise_on_error=False)
            for failed in (read, time):
                if isinstance(failed, Exception):
                    raise failed
            seconds, micros = time
            told = [_entry(number.decode(), fields) for _, entries in read or () for number, fields in entries]
            return Exchanged(told, seconds * 1000 + micros // 1000, _unwritten(written))

    async def close(self) -> None:
        """See Stream."""
        await self._line.close()


def is_after(number: str, other: str) -> bool:
    """Was the entry `number` written after `other`?"""
    return _place(number) > _place(other)


def earlier(number: str, by_s: float) -> str:
    """The place in the stream that was `by_s` before the entry `number`: numbers begin with the server's time."""
    return f"{max(0, _place(number)[0] - round(by_s * 1000))}-0"


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
