"""API keys that are issued while the router runs: what is kept of each, and how the kept ones change. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from policies.errors import InvalidRequest
from policies.nouns import Limits
from policies.suggest import did_you_mean

PREFIX = "pm_"
"""Every issued key begins so: scanners of repositories find one, and what begins so was never anybody's own idea."""

MOST_OF_TENANT = 64
"""Keys of one tenant, expired ones included."""

MOST = 10_000
"""Keys of all tenants. Each is about 200 bytes, and every change writes all of them."""


def hash_of(key: str) -> str:
    """The sha256 hex digest under which a key is known.

    Plain SHA-256 is enough for issued keys, which have 256 random bits: nobody tries out so many. Salt and slowness
    (RFC 9106 and its kin) are for passwords that people choose, and would cost each request milliseconds.
    Bytes that are no UTF-8 come in headers as lone surrogates (PEP 383) and count as what they were.
    """
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def id_of(sha256: str) -> str:
    """The name of the key with this digest, which says nothing about the key."""
    return sha256[:12]


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """What is kept of a key that operators issued for `tenant`: its hash, never itself. Times are Unix seconds.

    `replaced_by` is the id of the key that it was rotated to. `limits` hold beside those of its tenant.
    """

    sha256: str
    tenant: str
    created: int
    name: str | None = None
    expires: int | None = None
    replaced_by: str | None = None
    limits: Limits | None = None

    @property
    def id(self) -> str:
        """What operators call it."""
        return id_of(self.sha256)

    def has_expired(self, now: float) -> bool:
        """Is its time over?"""
        return self.expires is not None and now >= self.expires


KeyBook = Mapping[str, IssuedKey]
"""All issued keys by sha256. Immutable: every change makes another one."""

NO_KEYS: KeyBook = MappingProxyType({})


def keys_of(book: KeyBook, tenant: str) -> list[IssuedKey]:
    """The keys of `tenant`, oldest first."""
    return sorted((key for key in book.values() if key.tenant == tenant), key=lambda key: (key.created, key.id))


def find_key(book: KeyBook, tenant: str, id: str) -> IssuedKey:  # noqa: A002 - that is what it is called
    """The key of `tenant` with this id. Raises InvalidRequest."""
    known = {key.id: key for key in keys_of(book, tenant)}
    if id not in known:
        hint = did_you_mean(id, known) or f"GET /admin/tenants/{tenant}/keys lists them"
        raise InvalidRequest(f"'{tenant}' has no key '{id[:80]}' that was issued", hint=hint, param="id")
    return known[id]


def with_key(book: KeyBook, key: IssuedKey, *, now: float) -> KeyBook:
    """`book` with one more. The one that has been expired for longest makes room. Raises InvalidRequest."""
    others = keys_of(book, key.tenant)
    expired = sorted((one for one in others if one.has_expired(now)), key=lambda one: one.expires or 0)
    left = dict(book)
    if len(others) >= MOST_OF_TENANT:
        if not expired:
            raise InvalidRequest(f"'{key.tenant}' has {len(others)} keys, the most there may be", hint="revoke one")
        del left[expired[0].sha256]
    if len(left) >= MOST:
        hint = "revoke those that nobody uses, or keep long-lived ones in the SLA file"
        raise InvalidRequest(f"there are {len(left):,} keys, the most there may be", hint=hint)
    if any(one.id == key.id for one in left.values()):
        raise InvalidRequest(f"there is a key {key.id} already", hint="try again: ids are random")
    return MappingProxyType({**left, key.sha256: key})


def rotated(book: KeyBook, old: str, new: IssuedKey, *, until: int, now: float) -> KeyBook:
    """`book` with `new` in the place of the key `old`, which lives on until then, or until it expires anyhow.

    Raises InvalidRequest: a key that was rotated already has one in its place.
    """
    before = find_key(book, new.tenant, old)
    if before.replaced_by is not None:
        raise InvalidRequest(f"the key {old} was rotated already", hint=f"rotate {before.replaced_by}", param="id")
    expires = until if before.expires is None else min(until, before.expires)
    ending = replace(before, expires=expires, replaced_by=new.id)
    # the old one first: it may be expired, and then the one that makes room
    return with_key(MappingProxyType({**book, before.sha256: ending}), new, now=now)


def without_key(book: KeyBook, tenant: str, id: str) -> KeyBook:  # noqa: A002 - that is what it is called
    """`book` without the key of `tenant` with this id. Raises InvalidRequest."""
    gone = find_key(book, tenant, id)
    return MappingProxyType({digest: key for digest, key in book.items() if digest != gone.sha256})
