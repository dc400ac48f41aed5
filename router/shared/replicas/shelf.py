"""Storage of snapshots in Redis or Valkey: a header, and a list of pieces under the name in the header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.shared.redis.line import RedisLine
from router.shared.redis.script import Script
from router.shared.replicas.stream import KEPT_S
from tls.certificates import Certificates

_UNFINISHED_S, _OUTDATED_S = 60, 30
"""Pieces of an unfinished or outdated snapshot expire after this time; a router may still be reading them."""


_CLAIM = """
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[3])
return 1
"""
_PUBLISH = """
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return 0 end
redis.call('EXPIRE', KEYS[2], ARGV[3])
return {redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3], 'GET')}
"""


class Superseded(Exception):
    """Another router has claimed the next snapshot since."""


class Shelf(Protocol):
    """Holds one snapshot, and unfinished ones. Every method but `close` may raise StoreFailed."""

    async def claim(self, by: str, for_s: float) -> bool:
        """Whether `by` may write the next snapshot; no other router may for `for_s` then."""
        ...

    async def append(self, name: str, pieces: Sequence[bytes]) -> None:
        """Append `pieces` to the unpublished snapshot `name`."""
        ...

    async def publish(self, name: str, header: bytes, by: str) -> bytes | None:
        """Make the snapshot `name` of `by` the one to read; returns the header of the one before. Raises Superseded."""
        ...

    async def outdate(self, name: str) -> None:
        """Let the snapshot `name` expire soon."""
        ...

    async def header(self) -> bytes | None:
        """The header of the published snapshot, if there is one."""
        ...

    async def pieces(self, name: str, start: int, count: int) -> Sequence[bytes]:
        """`count` pieces of the snapshot `name` from number `start` on; none if it is gone."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class RedisShelf:
    """A shelf at `url`, on one connection, without deadlines and retries."""

    def __init__(
        self, url: str, *, key: str = "pointsman:replicas:snapshot", certificates: Certificates | None = None
    ) -> None:
        self._line, self._key = RedisLine(url, certificates), key
        self._claim, self._publish = Script(_CLAIM), Script(_PUBLISH)

    def __repr__(self) -> str:
        return f"<RedisShelf {self._key}>"

    async def claim(self, by: str, for_s: float) -> bool:
        keys = [f"{self._key}:writer", f"{self._key}:last-writer"]
        async with self._line.calls() as client:
            return bool(await self._claim.run(client, keys, [by, max(1, round(for_s * 1000)), KEPT_S]))

    async def append(self, name: str, pieces: Sequence[bytes]) -> None:
        """See Shelf. One round trip."""
        async with self._line.pipe() as pipe:
            pipe.rpush(self._list(name), *pieces)
            pipe.expire(self._list(name), _UNFINISHED_S)
            await pipe.execute()

    async def publish(self, name: str, header: bytes, by: str) -> bytes | None:
        """See Shelf. One round trip."""
        keys = [self._key, self._list(name), f"{self._key}:last-writer"]
        async with self._line.calls() as client:
            found = await self._publish.run(client, keys, [by, header, KEPT_S])
        if found == 0:
            raise Superseded
        # Lua's false ends a list
        return _bytes(found[0]) if found else None

    async def outdate(self, name: str) -> None:
        async with self._line.pipe() as pipe:
            pipe.expire(self._list(name), _OUTDATED_S)
            await pipe.execute()

    async def header(self) -> bytes | None:
        async with self._line.pipe() as pipe:
            pipe.get(self._key)
            (found,) = await pipe.execute()
            return _bytes(found)

    async def pieces(self, name: str, start: int, count: int) -> Sequence[bytes]:
        async with self._line.pipe() as pipe:
            pipe.lrange(self._list(name), start, start + count - 1)
            (found,) = await pipe.execute()
            return [bytes(piece) for piece in found]

    async def close(self) -> None:
        await self._line.close()

    def _list(self, name: str) -> str:
        return f"{self._key}:{name}"


def _bytes(found: object) -> bytes | None:
    if found is None or isinstance(found, bytes):
        return found
    raise TypeError(f"{str(found)[:80]!r} is not a header")
