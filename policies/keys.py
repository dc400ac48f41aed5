"""API keys that are issued at run time: the stored record of each, and pure changes of the set of records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from policies.errors import InvalidRequest
from policies.nouns import Limits
from policies.suggest import did_you_mean

PREFIX = "pm_"
"""Prefix of every issued key, so that scanners of repositories find them and no key chosen by hand begins so."""

MOST_OF_TENANT = 64
"""Keys of one tenant, expired ones included."""

MOST = 10_000
"""Keys of all tenants. Each takes about 200 bytes, and every change writes all of them."""


def hash_of(key: str) -> str:
    """The sha256 hex digest that identifies a key.

    Plain SHA-256 is enough for issued keys, because 256 random bits cannot be guessed. Salt and slow hashes
    (RFC 9106 and similar) are for passwords that people choose, and would cost each request milliseconds.
    Bytes of a command line that are not UTF-8 arrive as lone surrogates (PEP 383) and are hashed as they were.
    """
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def id_of(sha256: str) -> str:
    """The id of the key with this digest, which reveals nothing about the key."""
    return sha256[:12]


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """The stored record of a key that operators issued for `tenant`: its hash, never itself. Times are Unix seconds.

    `replaced_by` is the id of the key that it was rotated to. `limits` hold in addition to those of its tenant and
    its `team`.
    """

    sha256: str
    tenant: str
    created: int
    name: str | None = None
    expires: int | None = None
    replaced_by: str | None = None
    limits: Limits | None = None
    team: str | None = None

    @property
    def id(self) -> str:
        """The name that operators use."""
        return id_of(self.sha256)

    def has_expired(self, now: float) -> bool:
        """Whether it has expired."""
        return self.expires is not None and now >= self.expires


KeyBook = Mapping[str, IssuedKey]
"""All issued keys by sha256. Immutable: every change returns a new one."""

NO_KEYS: KeyBook = MappingProxyType({})


def keys_of(book: KeyBook, tenant: str) -> list[IssuedKey]:
    """The keys of `tenant`, oldest first."""
    return sorted((key for key in book.values() if key.tenant == tenant), key=lambda key: (key.created, key.id))


def find_key(book: KeyBook, tenant: str, id: str) -> IssuedKey:  # noqa: A002 - that is what it is called
    """The key of `tenant` with this id. Raises InvalidRequest."""
    known = {key.id: key for key in keys_of(book, tenant)}
    if id not in known:
        hint = did_you_mean(id, known) or f"GET /admin/tenants/{tenant}/keys lists them"
        raise InvalidRequest(f"'{tenant}' has no issued key '{id[:80]}'", hint=hint, param="id")
    return known[id]


def with_key(book: KeyBook, key: IssuedKey, *, now: float) -> KeyBook:
    """`book` with `key` added. The longest expired key is removed to make room. Raises InvalidRequest."""
    others = keys_of(book, key.tenant)
    expired = sorted((other for other in others if other.has_expired(now)), key=lambda other: other.expires or 0)
    left = dict(book)
    if len(others) >= MOST_OF_TENANT:
        if not expired:
            raise InvalidRequest(f"'{key.tenant}' has {len(others)} keys, the maximum", hint="revoke one")
        del left[expired[0].sha256]
    if len(left) >= MOST:
        hint = "revoke unused ones, or keep long-lived ones in the SLA file"
        raise InvalidRequest(f"there are {len(left):,} keys, the maximum", hint=hint)
    if any(other.id == key.id for other in left.values()):
        raise InvalidRequest(f"there is a key {key.id} already", hint="try again: ids are random")
    return MappingProxyType({**left, key.sha256: key})


def rotated(book: KeyBook, old: str, new: IssuedKey, *, until: int, now: float) -> KeyBook:
    """`book` with `new` as the replacement of the key `old`, which stays valid until `until` or its own expiry.

    Raises InvalidRequest if the key was rotated before: then it has a replacement.
    """
    before = find_key(book, new.tenant, old)
    if before.replaced_by is not None:
        raise InvalidRequest(f"the key {old} was rotated already", hint=f"rotate {before.replaced_by}", param="id")
    expires = until if before.expires is None else min(until, before.expires)
    ending = replace(before, expires=expires, replaced_by=new.id)
    # the old one first: if it has expired, it may be the one that makes room
    return with_key(MappingProxyType({**book, before.sha256: ending}), new, now=now)


def with_limits(book: KeyBook, tenant: str, id: str, limits: Limits | None) -> KeyBook:  # noqa: A002
    """`book` with other `limits` for the key of `tenant` with this id; what it has used stays used.

    Raises InvalidRequest.
    """
    before = find_key(book, tenant, id)
    return MappingProxyType({**book, before.sha256: replace(before, limits=limits)})


def without_key(book: KeyBook, tenant: str, id: str) -> KeyBook:  # noqa: A002 - that is what it is called
    """`book` without the key of `tenant` with this id. Raises InvalidRequest."""
    gone = find_key(book, tenant, id)
    return MappingProxyType({digest: key for digest, key in book.items() if digest != gone.sha256})
