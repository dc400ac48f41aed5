"""Document sets in Redis or Valkey, shared by all routers that name the same server."""

from __future__ import annotations

import math
import secrets
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from policies.errors import Unavailable
from router.shared.documents.document_set import DocumentSet, Key, Note, Texts, Uses
from router.shared.redis.line import RedisLine
from router.shared.redis.script import Script
from router.shared.store.base import StoreFailed
from tls.certificates import Certificates

PATIENCE_S = 2.0
"""Deadline of one call: a request that names a set waits for it."""

_LINGERS_S = 60
"""The texts of a replaced version stay for requests that have just read its name."""

_COUNTED_S = 8 * 86_400
"""Longer than any set is kept without a refresh."""

_MOST_STEP = 2**20

_PER_CALL = 256
"""Documents that are written in one command."""

_NOTES, _SETS = msgspec.msgpack.Decoder(Note), msgspec.msgpack.Decoder(DocumentSet)

_PUT = """
if tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0') ~= tonumber(ARGV[2]) then return 0 end
redis.call('HINCRBY', KEYS[3], ARGV[1], ARGV[8])
redis.call('HSET', KEYS[1], ARGV[3], ARGV[5])
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
if redis.call('EXISTS', KEYS[6]) == 1 then redis.call('RENAME', KEYS[6], KEYS[4]) end
if KEYS[5] ~= KEYS[4] then redis.call('EXPIRE', KEYS[5], ARGV[7]) end
redis.call('EXPIREAT', KEYS[4], ARGV[6])
return 1
"""
"""Keys: sets, revisions, changes; the texts of this version, of the one before, and those to be renamed. Arguments: the
tenant and its changes, the set's field, revision and value, when its texts expire, how long others linger, and by how
much the changes grow."""

_DROP = """
if redis.call('HGET', KEYS[2], ARGV[2]) ~= ARGV[3] then return 0 end
redis.call('HINCRBY', KEYS[6], ARGV[1], ARGV[4])
redis.call('HDEL', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[2])
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
return 1
"""
_NOTE = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
for at = 2, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
return 1
"""
_LEAD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

_UNREADABLE = (ValueError, RecursionError)
"""What values raise that others wrote: msgspec's errors are ValueErrors."""

_MOST_DIGITS = 64
"""Of a number; an error shows all of what is none."""

_SUMS = ("requests", "cached_tokens", "saved_s", "saved_cost")


class RedisSets:
    """A SetStore for all routers: under `prefix` hashes of all sets, of their revisions and of the changes of tenants,
    and for each set hashes of its texts, notes and uses, which expire with it. In a cluster `prefix` has a hash tag, so
    that all are in one slot.
    """

    def __init__(self, url: str, *, prefix: str = "pointsman:", certificates: Certificates | None = None) -> None:
        self._line = RedisLine(url, certificates, timeout_s=PATIENCE_S)
        self._prefix = f"{prefix}documents:"
        self._sets, self._revisions = f"{self._prefix}sets", f"{self._prefix}revisions"
        self._changes = f"{self._prefix}changes"
        self._put = Script(_PUT)
        self._drop = Script(_DROP)
        self._note = Script(_NOTE)
        self._lead = Script(_LEAD)

    def __repr__(self) -> str:
        return f"<RedisSets {self._prefix}>"

    async def revision(self, key: Key) -> int:
        return int(await self._asked(self._line.redis.hget(self._revisions, _field(key)), _number))

    async def look(self, key: Key) -> DocumentSet | None:
        found: DocumentSet | None = await self._asked(self._line.redis.hget(self._sets, _field(key)), _read)
        return found

    async def all(self) -> list[DocumentSet]:
        found: list[DocumentSet] = await self._asked(self._line.redis.hgetall(self._sets), sets_in)
        return found

    async def changes(self, tenant: str) -> int:
        return int(await self._asked(self._line.redis.hget(self._changes, tenant), _number))

    async def put(self, kept: DocumentSet, texts: Texts | None, *, after: int) -> bool:
        """See SetStore. Texts are written under a name of their own first: of two that write at once, one is kept."""
        at, before = self._texts_at(kept), await self.look(kept.key)
        new, items = f"{self._prefix}new:{uuid.uuid4().hex}", list((texts or {}).items())
        for first in range(0, len(items), _PER_CALL):
            await self._asked(self._line.redis.hset(new, mapping=dict(items[first : first + _PER_CALL])))
            # it was never kept if this router ends meanwhile
            await self._asked(self._line.redis.expire(new, _LINGERS_S))
        old = at if before is None else self._texts_at(before)
        args: list[str | int | bytes] = [kept.tenant, after, _field(kept.key), kept.revision]
        args += [msgspec.msgpack.encode(kept), int(kept.expires_at) + _LINGERS_S, _LINGERS_S, _step()]
        keys = [self._sets, self._revisions, self._changes, at, old, new]
        is_kept = bool(await self._asked(self._put.run(self._line.redis, keys, args)))
        if not is_kept and items:
            await self._asked(self._line.redis.delete(new))
        return is_kept

    async def texts(self, kept: DocumentSet, ids: Collection[str]) -> dict[str, str]:
        names = list(ids)
        if not names:
            return {}
        found = await self._asked(self._line.redis.hmget(self._texts_at(kept), names))
        there = {name: text for name, text in zip(names, found, strict=True) if text is not None}
        # what is no UTF-8 was changed there, and its digest does not fit
        return {name: text.decode(errors="replace") for name, text in there.items()}

    async def drop(self, kept: DocumentSet) -> bool:
        names = [self._at(what, kept.key) for what in ("notes", "uses")]
        keys = [self._sets, self._revisions, self._texts_at(kept), *names, self._changes]
        return bool(
            await self._asked(
                self._drop.run(self._line.redis, keys, [kept.tenant, _field(kept.key), kept.revision, _step()])
            )
        )

    async def note(self, key: Key, notes: Mapping[str, Note]) -> None:
        if notes:
            written = [part for name, note in notes.items() for part in (name, msgspec.msgpack.encode(note))]
            await self._asked(
                self._note.run(self._line.redis, [self._sets, self._at("notes", key)], [_field(key), *written])
            )

    async def notes(self, key: Key) -> dict[str, Note]:
        found: dict[str, Note] = await self._asked(self._line.redis.hgetall(self._at("notes", key)), notes_in)
        return found

    async def count(self, key: Key, uses: Mapping[str, Uses]) -> None:
        at = self._at("uses", key)
        pipe = self._line.redis.pipeline(transaction=False)
        for name, more in uses.items():
            for part in _SUMS:
                pipe.hincrbyfloat(at, f"{part}:{name}", getattr(more, part))
            pipe.hset(at, f"last_at:{name}", more.last_at)
        # a set that was dropped meanwhile leaves nothing
        pipe.expire(at, _COUNTED_S)
        await self._asked(pipe.execute())

    async def uses(self, key: Key) -> dict[str, Uses]:
        found: dict[str, Uses] = await self._asked(self._line.redis.hgetall(self._at("uses", key)), uses_in)
        return found

    async def leads(self, by: str, for_s: float) -> bool:
        lead = self._lead.run(self._line.redis, [f"{self._prefix}leader"], [by, round(1000 * for_s)])
        return bool(await self._asked(lead))

    async def close(self) -> None:
        await self._line.close()

    async def _asked(self, call: Any, read: Callable[[Any], Any] = lambda found: found) -> Any:
        """What `read` makes of the answer to `call`. Raises Unavailable."""
        hint = "try again, or send the documents with their texts"
        try:
            async with self._line.calls():
                found = await call
        except StoreFailed as failure:
            raise Unavailable(f"the store of documents is away: {failure}", hint=hint, retry_after_s=2.0) from failure
        try:
            return read(found)
        except _UNREADABLE as error:
            reason = f"the store of documents has a value that cannot be read: {error}"
            raise Unavailable(reason, hint=hint, retry_after_s=2.0) from error

    def _texts_at(self, kept: DocumentSet) -> str:
        return f"{self._at('texts', kept.key)}:{kept.version}"

    def _at(self, what: str, key: Key) -> str:
        return f"{self._prefix}{what}:{_field(key)}"


def _step() -> int:
    """By how much a tenant's changes grow: a failover that loses some of them is not to end at a number that a router
    has read before."""
    return 1 + secrets.randbelow(_MOST_STEP)


def _field(key: Key) -> str:
    return "\x00".join(key)


def _read(found: bytes | None) -> DocumentSet | None:
    return None if found is None else _SETS.decode(found)


def _number(found: bytes | None) -> int:
    return int(found or 0)


def sets_in(found: Mapping[bytes, bytes]) -> list[DocumentSet]:
    """The sets in the values of a hash, without those that cannot be read."""
    sets = []
    for value in found.values():
        with suppress(*_UNREADABLE):
            sets.append(_SETS.decode(value))
    return sets


def notes_in(found: Mapping[bytes, bytes]) -> dict[str, Note]:
    """The notes of a hash by documents, without those that cannot be read."""
    notes = {}
    for name, value in found.items():
        with suppress(*_UNREADABLE):
            notes[name.decode()] = _NOTES.decode(value)
    return notes


def uses_in(found: Mapping[bytes, bytes]) -> dict[str, Uses]:
    """The uses of a hash by documents; a number that cannot be read is 0."""
    parts: dict[str, dict[str, float]] = {}
    for where, value in found.items():
        with suppress(*_UNREADABLE):
            part, _, name = where.decode().partition(":")
            number = float(value[:_MOST_DIGITS])
            if math.isfinite(number):
                parts.setdefault(name, {})[part] = number
    return {
        name: Uses(
            round(one.get("requests", 0)),
            round(one.get("cached_tokens", 0)),
            one.get("saved_s", 0.0),
            round(one.get("saved_cost", 0)),
            one.get("last_at", 0.0),
        )
        for name, one in parts.items()
    }
