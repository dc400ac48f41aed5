"""The issued keys as requests see them: a dictionary, kept fresh from a store."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from policies.errors import ConfigError, InvalidRequest, Unavailable
from policies.keys import (
    NO_KEYS,
    PREFIX,
    IssuedKey,
    KeyBook,
    find_key,
    hash_of,
    keys_of,
    rotated,
    with_key,
    with_limits,
    without_key,
)
from policies.nouns import Limits
from router.shared.keys.base import Edit, KeyStore

LOOK_EVERY_S = 0.5
"""Time between two looks: longest time until a router learns of a key that another router issued or revoked."""

_log = logging.getLogger("pointsman.keys")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. `text` is the key itself, which is not stored and shown only once."""

    text: str
    kept: IssuedKey

    def __repr__(self) -> str:
        return f"<NewKey {self.kept.id}>"


class KeyRing:
    """Looks keys up, and issues, rotates and revokes them in `store`; None: there are none and none can be issued.

    While the store is away the known keys stay valid. `clock` is Unix time. `on_event` gets `keys_away`,
    `keys_refused` (the store's contents are not a book) and `keys_back`.
    """

    def __init__(
        self,
        store: KeyStore | None,
        *,
        clock: Callable[[], float],
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._store, self._clock, self._on_event = store, clock, on_event
        self._book: KeyBook = NO_KEYS
        self._used: dict[str, float] = {}
        # one access to the store at a time: an old answer must not arrive after a new one
        self._turn = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._trouble: str | None = None
        self.is_known = store is None
        """Whether the store was ever read. Until then a key that is not found may still be valid."""

    def __repr__(self) -> str:
        return f"<KeyRing {len(self._book)} keys{f', {self._trouble}' if self._trouble else ''}>"

    @property
    def is_empty(self) -> bool:
        """Whether the book has no keys."""
        return not self._book

    def now(self) -> float:
        """Unix time, by which keys expire."""
        return self._clock()

    def find(self, digest: str) -> IssuedKey | None:
        """The key with this sha256, expired or not. Records its use."""
        found = self._book.get(digest)
        if found is not None:
            self._used[digest] = self._clock()
        return found

    def of(self, tenant: str) -> list[IssuedKey]:
        """The keys of `tenant`, oldest first."""
        return keys_of(self._book, tenant)

    def all(self) -> Collection[IssuedKey]:
        """The keys of all tenants."""
        return self._book.values()

    def used(self, digest: str) -> float | None:
        """Unix time of the key's last use at this router since its start; None without one."""
        return self._used.get(digest)

    async def start(self) -> None:
        """Read the store, or begin without it if it is away. Raises ConfigError if its contents are not a book."""
        if self._store is None:
            return
        try:
            async with self._turn:
                self._take(await self._store.look())
        except Unavailable as error:
            self._note(error)

    async def watch(self) -> None:
        """Read the store every LOOK_EVERY_S, until cancelled."""
        while self._store is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read the store's book; if it cannot be read, continue with the known one."""
        assert self._store is not None
        try:
            async with self._turn:
                self._take(await self._store.look())
        except (Unavailable, ConfigError) as error:
            self._note(error)
            return
        if self._trouble is not None:
            self._trouble = None
            self._on_event("keys_back")

    async def issue(
        self,
        tenant: str,
        *,
        name: str | None = None,
        lives_s: float | None = None,
        limits: Limits | None = None,
        team: str | None = None,
    ) -> NewKey:
        """A new key for `tenant` or its `team`, valid here at once. Raises InvalidRequest, Unavailable, ConfigError."""
        made = self._made(tenant, name, lives_s, limits, team)
        await self._change(lambda book: with_key(book, made.kept, now=self._clock()))
        _log.info("key %s of tenant %s was issued", made.kept.id, tenant)
        return made

    async def rotate(self, tenant: str, id: str, *, overlap_s: float, lives_s: float | None = None) -> NewKey:  # noqa: A002
        """A new key in place of the key `id`, which stays valid for another `overlap_s`. Raises as `issue` does.

        The new key has the old one's name, team and limits, and its lifetime too unless `lives_s` is given.
        """
        if self._store is not None:
            await self.look()  # another router may have issued it a moment ago
        old = find_key(self._book, tenant, id)
        if lives_s is None and old.expires is not None:
            lives_s = old.expires - old.created
        made = self._made(tenant, old.name, lives_s, old.limits, old.team)
        until = math.ceil(self._clock() + overlap_s)
        await self._change(lambda book: rotated(book, id, made.kept, until=until, now=self._clock()))
        _log.info("key %s of tenant %s was rotated to %s", id, tenant, made.kept.id)
        return made

    async def limit(self, tenant: str, id: str, limits: Limits | None) -> IssuedKey:  # noqa: A002
        """Other `limits` for the key from now on; None: none of its own. Returns it. Raises as `issue` does."""
        await self._change(lambda book: with_limits(book, tenant, id, limits))
        _log.info("key %s of tenant %s has other limits", id, tenant)
        return find_key(self._book, tenant, id)

    async def revoke(self, tenant: str, id: str) -> None:  # noqa: A002
        """Reject the key from now on; running requests continue. Raises as `issue` does."""
        await self._change(lambda book: without_key(book, tenant, id))
        _log.info("key %s of tenant %s was revoked", id, tenant)

    async def close(self) -> None:
        """Close the store after the running changes."""
        if self._changes:
            await asyncio.wait(self._changes)
        if self._store is not None:
            await self._store.close()

    def _made(
        self, tenant: str, name: str | None, lives_s: float | None, limits: Limits | None, team: str | None
    ) -> NewKey:
        # not from the router's rng, which is seeded in tests and predictable everywhere
        text, created = PREFIX + secrets.token_urlsafe(32), int(self._clock())
        expires = None if lives_s is None else created + math.ceil(lives_s)
        return NewKey(text, IssuedKey(hash_of(text), tenant, created, name, expires, limits=limits, team=team))

    async def _change(self, edit: Edit) -> None:
        # the change goes on if its caller leaves: the store would have it, so it must be known here too
        task = asyncio.create_task(self._changed(edit))
        self._changes.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    async def _changed(self, edit: Edit) -> None:
        if self._store is None:
            hint = "set server.state to a folder, or store.redis to a Redis"
            raise InvalidRequest("this router has no store for keys", hint=hint)
        async with self._turn:
            self._take(await self._store.change(edit))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has gone: read the exception so that asyncio does not log it

    def _take(self, book: KeyBook | None) -> None:
        self.is_known = True
        if book is not None:
            self._book = book
            self._used = {digest: at for digest, at in self._used.items() if digest in book}

    def _note(self, error: Unavailable | ConfigError) -> None:
        if error.code == self._trouble:
            return
        self._trouble = error.code
        if isinstance(error, ConfigError):
            self._on_event("keys_refused")
        else:
            self._on_event("keys_away")
        _log.warning("issued keys: %s", error)
