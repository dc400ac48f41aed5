"""Where snapshots lie, in Redis or Valkey: a header, and a list of pieces under the name that the header gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.shared.replicas.line import KEPT_S, RedisLine

_UNFINISHED_S, _OUTDATED_S = 60, 30
"""Pieces that nobody goes on writing go after so long, and those that somebody may be reading still."""


class Shelf(Protocol):
    """Holds one snapshot, and those that are being written. Everything but `close` may raise StoreFailed."""

    async def claim(self, by: str, for_s: float) -> bool:
        """Is `by` the one that writes the next snapshot? Nobody else is for `for_s` then."""
        ...

    async def append(self, name: str, pieces: Sequence[bytes]) -> None:
        """Put `pieces` behind those of the snapshot `name`, which nobody sees yet."""
        ...

    async def publish(self, name: str, header: bytes) -> bytes | None:
        """The snapshot `name` is the one to read from now on; the header of the one before."""
        ...

    async def outdate(self, name: str) -> None:
        """Let the snapshot `name` go soon."""
        ...

    async def header(self) -> bytes | None:
        """That of the snapshot to read, if there is one."""
        ...

    async def pieces(self, name: str, start: int, count: int) -> Sequence[bytes]:
        """So many pieces of the snapshot `name` from number `start` on; none if it is gone."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class RedisShelf:
    """A shelf at `url`, on one connection. It knows no deadline and does not retry."""

    def __init__(self, url: str, *, key: str = "pointsman:replicas:snapshot") -> None:
        self._line, self._key = RedisLine(url), key

    def __repr__(self) -> str:
        return f"<RedisShelf {self._key}>"

    async def claim(self, by: str, for_s: float) -> bool:
        """See Shelf."""
        async with self._line.pipe() as pipe:
            pipe.set(f"{self._key}:writer", by, nx=True, px=max(1, round(for_s * 1000)))
            (is_ours,) = await pipe.execute()
            return bool(is_ours)

    async def append(self, name: str, pieces: Sequence[bytes]) -> None:
        """See Shelf. One round trip."""
        async with self._line.pipe() as pipe:
            pipe.rpush(self._list(name), *pieces)
            pipe.expire(self._list(name), _UNFINISHED_S)
            await pipe.execute()

    async def publish(self, name: str, header: bytes) -> bytes | None:
        """See Shelf. One round trip."""
        async with self._line.pipe() as pipe:
            pipe.expire(self._list(name), KEPT_S)
            pipe.set(self._key, header, ex=KEPT_S, get=True)
            _, before = await pipe.execute()
            return _bytes(before)

    async def outdate(self, name: str) -> None:
        """See Shelf."""
        async with self._line.pipe() as pipe:
            pipe.expire(self._list(name), _OUTDATED_S)
            await pipe.execute()

    async def header(self) -> bytes | None:
        """See Shelf."""
        async with self._line.pipe() as pipe:
            pipe.get(self._key)
            (found,) = await pipe.execute()
            return _bytes(found)

    async def pieces(self, name: str, start: int, count: int) -> Sequence[bytes]:
        """See Shelf."""
        async with self._line.pipe() as pipe:
            pipe.lrange(self._list(name), start, start + count - 1)
            (found,) = await pipe.execute()
            return [bytes(one) for one in found]

    async def close(self) -> None:
        """See Shelf."""
        await self._line.close()

    def _list(self, name: str) -> str:
        return f"{self._key}:{name}"


def _bytes(found: object) -> bytes | None:
    if found is None or isinstance(found, bytes):
        return found
    raise TypeError(f"{str(found)[:80]!r} is no header")
