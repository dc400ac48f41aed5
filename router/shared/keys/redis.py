"""Issued keys in Redis or Valkey, shared by all routers that name the same server."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from policies.errors import ConfigError, Unavailable
from policies.keys import NO_KEYS, KeyBook
from router.shared.keys.base import Edit
from router.shared.keys.lines import decode, encode
from router.shared.redis.line import AnyRedis, RedisLine
from router.shared.redis.script import Script
from router.shared.store.base import StoreFailed
from tls.certificates import Certificates

PATIENCE_S = 1.0
"""Deadline of one call to the server. No request waits for it, but operators do."""

_TRIES = 20
"""Most attempts of one change, if other routers change the book at the same time."""

_MOST_STEP = 2**20
"""By how much a revision grows at most: Redis has exact numbers up to 2**53."""

_PUT = """
local now = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0')
if now < tonumber(ARGV[1]) or now > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'revision', ARGV[3], 'book', ARGV[4])
return 1
"""
"""Writes a revision and its book (the last two arguments) if the present revision is between the first two."""


class RedisKeys:
    """One hash at `key`: the book, and a revision that grows with each change.

    A revision older than the one read before means that the server has lost changes, for example by a restart without
    data. Then the known book is written back: otherwise a restart of Redis would lock every tenant out. `on_event`
    gets `keys_put_back`.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "pointsman:keys",
        on_event: Callable[[str], None] = lambda _: None,
        certificates: Certificates | None = None,
    ) -> None:
        self._line = RedisLine(url, certificates, timeout_s=PATIENCE_S)
        self._key, self._on_event = key, on_event
        self._put = Script(_PUT)
        self._revision, self._seen = -1, NO_KEYS

    def __repr__(self) -> str:
        return f"<RedisKeys {self._key}, {len(self._seen)} keys of revision {self._revision}>"

    async def look(self) -> KeyBook | None:
        before = self._revision
        await self._catch_up()
        return None if self._revision == before else self._seen

    async def change(self, edit: Edit) -> KeyBook:
        for _ in range(_TRIES):
            await self._catch_up()
            book, known = edit(self._seen), self._revision
            # two changes that a failover kept apart are not to have the same revision
            revision = known + 1 + secrets.randbelow(_MOST_STEP)
            if await self._written(book, revision, least=known, most=known):
                self._revision, self._seen = revision, book
                return book
        raise Unavailable("other routers keep changing the keys", hint="try again", retry_after_s=1.0)

    async def close(self) -> None:
        await self._line.close()

    async def _catch_up(self) -> None:
        """Read the book if it is newer than the known one; write the known one back if it is older."""
        revision = _number(await self._asked(lambda redis: redis.hget(self._key, "revision")))
        if revision < self._revision and await self._written(
            self._seen, self._revision, least=0, most=self._revision - 1
        ):
            self._on_event("keys_put_back")
            return
        if revision != self._revision:
            found, text = await self._asked(lambda redis: redis.hmget(self._key, "revision", "book"))
            try:
                book = decode(text or b"", f"'{self._key}' in Redis")
            except ConfigError as error:
                raise Unavailable(str(error), hint="keys that were read before stay valid") from error
            self._revision, self._seen = _number(found), book

    async def _written(self, book: KeyBook, revision: int, *, least: int, most: int) -> bool:
        arguments: list[str | int | bytes] = [least, most, revision, encode(book)]
        return bool(await self._asked(lambda redis: self._put.run(redis, [self._key], arguments)))

    async def _asked(self, call: Callable[[AnyRedis], Awaitable[Any]]) -> Any:
        try:
            async with self._line.calls() as redis:
                return await call(redis)
        except StoreFailed as failure:
            hint = "keys that were read before stay valid; list the keys before you try again, it may have happened"
            raise Unavailable(f"the store of keys is away: {failure}", hint=hint, retry_after_s=5.0) from failure


def _number(found: Any) -> int:
    try:
        return int(found or 0)
    except (TypeError, ValueError) as error:
        hint = "keys that were read before stay valid"
        raise Unavailable(f"the revision of the keys is not a number: {found!r}"[:120], hint=hint) from error
