"""The stream in Redis or Valkey that carries messages between routers. Redis 6.2 or newer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from router.shared.redis.faults import faults
from router.shared.redis.line import RedisLine
from router.shared.store.base import StoreFailed
from tls.certificates import Certificates

START = "0-0"
"""A position before every possible entry."""

MOST_ENTRIES = 20_000
"""About how many entries the stream keeps. Each has at most about 100 KiB, mostly a few."""

KEPT_S = 3600
"""The stream, and a snapshot, expires after this time without a write."""

AT_ONCE = 64
"""Most entries read in one go."""


_TIME = "return redis.call('TIME')"


class Entry(NamedTuple):
    """One entry: `number` is its place in the stream, `at_ms` when it was written on the server's clock."""

    number: str
    at_ms: int
    by: str
    payload: bytes


class StreamState(NamedTuple):
    """State of the stream: numbers of its `oldest` and `newest` entry, START if there is none.

    `is_cut`: older entries were dropped.
    """

    oldest: str = START
    newest: str = START
    is_cut: bool = False

    def lacks(self, after: str) -> bool:
        """Whether an entry after `after` is missing, or may be."""
        return is_after(after, self.newest) or (self.is_cut and is_after(self.oldest, after))


class Exchanged(NamedTuple):
    """Entries read, oldest first, at `now_ms` on the server's clock. `unwritten`: why the payloads may not have been
    written; None: they were."""

    entries: Sequence[Entry]
    now_ms: int
    unwritten: StoreFailed | None = None


class Stream(Protocol):
    """Carries messages between routers. Every method but `close` may raise StoreFailed."""

    async def state(self) -> StreamState:
        """The present state."""
        ...

    async def exchange(self, payloads: Sequence[bytes], after: str) -> Exchanged:
        """Write `payloads` and read the entries after `after`, AT_ONCE at most."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class RedisStream:
    """A stream at `url`, on one connection, without deadlines and retries. `by` is the writer's name."""

    def __init__(
        self,
        url: str,
        by: str,
        *,
        key: str = "pointsman:replicas",
        most: int = MOST_ENTRIES,
        certificates: Certificates | None = None,
    ) -> None:
        self._line, self._by, self._key, self._most = RedisLine(url, certificates), by, key, most

    def __repr__(self) -> str:
        return f"<RedisStream {self._key}>"

    async def state(self) -> StreamState:
        async with self._line.pipe() as pipe:
            pipe.xrange(self._key, count=1)
            pipe.xrevrange(self._key, count=1)
            pipe.xlen(self._key)
            *ends, length = await pipe.execute()
            oldest, newest = (end[0][0].decode() if end else START for end in ends)
            _place(oldest), _place(newest)
            # the stream is cut to about this length, never below it
            return StreamState(oldest, newest, length >= self._most)

    async def exchange(self, payloads: Sequence[bytes], after: str) -> Exchanged:
        """See Stream. One round trip."""
        async with self._line.pipe() as pipe:
            for payload in payloads:
                entry: dict[Any, Any] = {"by": self._by, "news": payload}
                pipe.xadd(self._key, entry, maxlen=self._most, approximate=True)
            pipe.expire(self._key, KEPT_S)
            pipe.xrange(self._key, f"({after}", count=AT_ONCE)
            # the time of the server that has the stream, which a cluster finds by the key
            pipe.eval(_TIME, 1, self._key)
            *written, _, read, time = await pipe.execute(raise_on_error=False)
            for failed in (read, time):
                if isinstance(failed, Exception):
                    raise failed
            seconds, micros = time
            entries = [_entry(number.decode(), fields) for number, fields in read]
            found = Exchanged(entries, int(seconds) * 1000 + int(micros) // 1000, _unwritten(written))
        if found.unwritten is not None:
            # a replica reads on, and the primary may be behind the same address by now
            await self._line.hang_up()
        return found

    async def close(self) -> None:
        await self._line.close()


def is_after(number: str, other: str) -> bool:
    """Whether the entry `number` was written after `other`."""
    return _place(number) > _place(other)


def earlier(number: str, by_s: float) -> str:
    """The position `by_s` before the entry `number`: numbers begin with the server's time."""
    return f"{max(0, _place(number)[0] - round(by_s * 1000))}-0"


def _place(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split("-"))


def _entry(number: str, fields: Any) -> Entry:
    # an entry of another program is for its reader to reject: the next one may be ours
    by, news = fields.get(b"by", b""), fields.get(b"news", b"")
    return Entry(number, _place(number)[0], by.decode(errors="replace"), news)


def _unwritten(written: Sequence[Any]) -> StoreFailed | None:
    try:
        with faults():
            for reply in written:
                if isinstance(reply, Exception):
                    raise reply
    except StoreFailed as failure:
        return failure
    return None
