"""All document sets: stored, named by requests, and computed ahead by one of the routers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from policies.errors import ExpectedError, InvalidRequest, QuotaExceeded, Unavailable, UnknownDocument, UnknownPrefix
from policies.nouns import Tenant
from router.ask import Ask, AskDocument, Documents
from router.shared.documents.base import SetStore
from router.shared.documents.document_set import AUTO, DocumentEntry, DocumentSet, Key, Note, Uses
from router.shared.prefixes.prefixes import Prefixes
from router.supervise import supervise
from router.waiters import Waiter, Waiters

MOST_DOCUMENTS = 4096
"""Documents of one set."""

EVERY_S, LEASE_S = 5.0, 15.0
"""Sets are looked after this often, by the router that has the lease."""

_AT_ONCE = 4
"""Documents that are computed at the same time."""

_MOST_TROUBLE = 200
"""Characters of an error that are stored."""

_AGAIN_S = 60.0
"""A document that could not be computed is tried again after so long."""

_MOST_CACHED_BYTES = 64 * 2**20
"""Texts of shared sets that a router remembers."""

_MOST_REMEMBERED = 1024
"""Sets that a router remembers, beside their texts."""

_MOST_COUNTED = 16 * 1024
"""Documents with uses that are not stored yet."""

_MOST_TRIES = 20
"""Most attempts of one change, if other routers change sets of the same tenant at the same time."""

_TURN_S = 10.0
"""Longest time that a change waits for others of its tenant here."""

_DIGEST_BITS = 52
"""Bits of a digest: whole numbers that each part of the chain has exactly."""

_log = logging.getLogger("pointsman.documents")

Doc = tuple[str, str, str]
"""A document among all: tenant, set, id."""


class SetWish(NamedTuple):
    """What a set should be: how long it is kept and, with a `model`, what its documents are computed with."""

    ttl_s: float
    model: str = ""
    head: bytes = b"[]"
    shards: int = AUTO


class _Change(NamedTuple):
    """A set as it is to be, with its texts if these change."""

    kept: DocumentSet
    texts: Mapping[str, str] | None


class Shown(NamedTuple):
    """A set with what is known of its documents. `states` are those of their prefixes, `waiting` without one yet."""

    kept: DocumentSet
    states: Mapping[str, str]
    notes: Mapping[str, Note]
    uses: Mapping[str, Uses]


@dataclass(slots=True)
class _Computed:
    """A document that this router has computed: its `digest`, its prefix, and the number of backends that it was for.

    Without a prefix it failed, and is tried again at `again_at`.
    """

    digest: int
    prefix: str = ""
    shards: int = 0
    until: float = 0.0
    again_at: float = 0.0


@dataclass(slots=True)
class _Counted:
    """Uses that are not stored yet, and how often a set and its documents were used here lately."""

    new: dict[str, Uses] = field(default_factory=dict)
    requests: float = 0.0
    of_document: dict[str, float] = field(default_factory=dict)


class DocumentSets:
    """Sets in `store`. An async context manager: while it is open, its task has documents computed and pinned as
    `prefixes`, if this router has the lease.

    `ask_of` makes the Ask that computes one document, `tenant_of` finds a tenant by name, and `backends_of` counts the
    backends of a model. `now` is Unix time, `by` this router's name.
    """

    def __init__(
        self,
        store: SetStore,
        prefixes: Prefixes,
        *,
        ask_of: Callable[[DocumentSet, AskDocument], Ask],
        tenant_of: Callable[[str], Tenant | None],
        backends_of: Callable[[str], int],
        now: Callable[[], float],
        by: str,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._prefixes, self._now, self._by, self._on_failure = store, prefixes, now, by, on_failure
        self._ask_of, self._tenant_of, self._backends_of = ask_of, tenant_of, backends_of
        self._remembered: OrderedDict[Key, DocumentSet] = OrderedDict()
        self._texts: OrderedDict[tuple[Key, int, str], str] = OrderedDict()
        self._cached_bytes = self._last_revision = 0
        self._computed: dict[Doc, _Computed] = {}
        self._counted: dict[Key, _Counted] = {}
        self._due: dict[Doc, tuple[DocumentSet, DocumentEntry, int]] = {}
        self._busy: set[Doc] = set()
        self._has_due, self._changed = asyncio.Event(), asyncio.Event()
        self._changing: set[str] = set()
        """Tenants with a change that is being made here."""
        self._waiters = Waiters[str, None, bool](
            take_back=lambda waiter, _: self._end_turn(waiter.owner), left=lambda: None
        )
        self._tasks: list[asyncio.Task[None]] = []
        # redis-py may answer a cancellation with the failure of a connection
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<DocumentSets {self._store!r}, {len(self._computed)} documents computed here>"

    async def __aenter__(self) -> DocumentSets:
        for what in (self._look_after, *[self._work] * _AT_ONCE):
            work = supervise("document sets", what, on_failure=lambda _: self._on_failure())
            self._tasks.append(asyncio.create_task(work, name="document sets"))
        return self

    async def __aexit__(self, *_: object) -> None:
        # pins stay, as those of prefixes do
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()

    async def put(
        self, name: str, tenant: Tenant, documents: Sequence[AskDocument], wish: SetWish, *, adds: bool = False
    ) -> DocumentSet:
        """Store `documents` as the set `name` of `tenant`: in place of those that it has, or if it `adds` beside them.

        Raises QuotaExceeded, InvalidRequest, Unavailable.
        """

        async def changed(before: DocumentSet | None) -> _Change:
            entries = {entry.id: entry for entry in before.entries} if adds and before is not None else {}
            texts = dict[str, str]()
            if adds and before is not None:
                texts = await self._store.texts(before, entries.keys())
            entries |= {document.id: _entry(document) for document in documents}
            texts |= {document.id: document.text for document in documents}
            if len(entries) > MOST_DOCUMENTS:
                hint = f"a set has at most {MOST_DOCUMENTS:,}; make several"
                raise InvalidRequest(f"{len(entries):,} documents are too many", hint=hint, param="documents")
            now, revision = self._now(), self._revision(before)
            kept = DocumentSet(
                tenant.name,
                name,
                version=revision,
                revision=revision,
                created_at=now if before is None else before.created_at,
                expires_at=now + wish.ttl_s,
                entries=tuple(entries.values()),
                model=wish.model,
                head=wish.head,
                shards=wish.shards,
            )
            await self._require_room(kept, tenant)
            return _Change(kept, texts)

        return await self._change((tenant.name, name), changed)

    async def refresh(self, name: str, tenant: Tenant, ttl_s: float) -> DocumentSet:
        """Keep the set for `ttl_s` from now on, never shorter than before. Raises UnknownDocument, Unavailable."""

        async def changed(before: DocumentSet | None) -> _Change:
            known = self._required(before, name)
            until = max(known.expires_at, self._now() + ttl_s)
            return _Change(replace(known, revision=self._revision(known), expires_at=until), None)

        return await self._change((tenant.name, name), changed)

    async def remove(self, name: str, tenant: Tenant, id: str) -> DocumentSet:  # noqa: A002 - it is the document's
        """The set without this document. Raises UnknownDocument, Unavailable."""

        async def changed(before: DocumentSet | None) -> _Change:
            known = self._required(before, name)
            entries = tuple(entry for entry in known.entries if entry.id != id)
            if len(entries) == len(known.entries):
                raise _unknown_documents(name, [id])
            texts = await self._store.texts(known, [entry.id for entry in entries])
            revision = self._revision(known)
            return _Change(replace(known, version=revision, revision=revision, entries=entries), texts)

        return await self._change((tenant.name, name), changed)

    async def drop(self, name: str, tenant: Tenant) -> DocumentSet:
        """Forget the set; the pins of its documents end. Raises UnknownDocument, Unavailable."""
        async with self._turn_of(tenant.name):
            for _ in range(_MOST_TRIES):
                kept = await self._known((tenant.name, name))
                if await self._store.drop(kept):
                    self._forget(kept.key)
                    self._changed.set()
                    return kept
        raise _keeps_changing(name)

    async def of(self, tenant: str) -> list[DocumentSet]:
        """The sets of `tenant`, by name. Raises Unavailable."""
        now = self._now()
        found = [kept for kept in await self._store.all() if kept.tenant == tenant and kept.expires_at > now]
        return sorted(found, key=lambda kept: kept.name)

    async def shown(self, name: str, tenant: str) -> Shown:
        """The set, with what is known of its documents. Raises UnknownDocument, Unavailable."""
        kept = await self._known((tenant, name))
        await self._store_uses(kept.key)
        notes, uses = await self._store.notes(kept.key), await self._store.uses(kept.key)
        digests = {entry.id: entry.digest for entry in kept.entries}
        notes = {name: note for name, note in notes.items() if note.digest == digests.get(name)}
        states = {entry.id: self._state(kept, notes.get(entry.id)) for entry in kept.entries}
        return Shown(kept, states, notes, uses)

    async def resolved(self, documents: Documents, tenant: str) -> Documents:
        """`documents` with the texts of those that are only named; all of their set, if none is named.

        Raises UnknownDocument, InvalidRequest, Unavailable.
        """
        kept = await self._known((tenant, documents.of_set), may_be_old=True)
        entries = {entry.id: entry for entry in kept.entries}
        each = documents.each or tuple(AskDocument(entry.id, "", entry.title) for entry in kept.entries)
        names = [document.id for document in each if not document.text]
        if unknown := [name for name in names if name not in entries]:
            raise _unknown_documents(kept.name, unknown)
        texts = await self._texts_of(kept, names)
        if gone := [name for name in names if name not in texts]:
            raise _unknown_documents(kept.name, gone)
        return replace(
            documents,
            each=tuple(
                document if document.text else AskDocument(document.id, texts[document.id], entries[document.id].title)
                for document in each
            ),
        )

    def used(self, tenant: str, name: str, uses: Mapping[str, Uses]) -> None:
        """A request of `tenant` used these documents of its set `name`. Cheap: it is stored later."""
        counted = self._counted.setdefault((tenant, name), _Counted())
        counted.requests += 1.0
        if sum(len(each.new) for each in self._counted.values()) + len(uses) > _MOST_COUNTED:
            return
        for document, more in uses.items():
            counted.new[document] = counted.new.get(document, Uses()) + more
            counted.of_document[document] = counted.of_document.get(document, 0.0) + 1.0

    async def turn(self) -> None:
        """Store uses, and if this router has the lease, list the documents that are due. Raises Unavailable."""
        for key in list(self._counted):
            await self._store_uses(key)
        if not await self._store.leads(self._by, LEASE_S):
            # the router that has it has them in its care
            self._computed.clear()
            self._due.clear()
            return
        kept, now = await self._store.all(), self._now()
        for each in kept:
            if each.expires_at <= now:
                await self._store.drop(each)
                self._forget(each.key)
        alive = [each for each in kept if each.expires_at > now and each.model]
        await self._end_others(alive)
        self._due = {}
        for each in alive:
            self._list_due(each)
        if self._due:
            self._has_due.set()

    def check(self) -> None:
        """Assert that what is remembered is within its bounds."""
        sizes = sum(map(len, self._texts.values()))
        assert self._cached_bytes == sizes <= _MOST_CACHED_BYTES, f"{self!r}: miscounted"
        assert len(self._remembered) <= _MOST_REMEMBERED, f"{self!r}: remembers too many sets"

    async def _look_after(self) -> None:
        while not self._is_closing:
            self._changed.clear()
            try:
                await self.turn()
            except Unavailable as error:
                _log.warning("document sets wait: %s", error.message)
                if self._is_closing:
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._changed.wait()

    def _list_due(self, kept: DocumentSet) -> None:
        """List the documents of `kept` that are missing, on too few backends, or about to expire."""
        for entry in kept.entries:
            where = (*kept.key, entry.id)
            shards, known = self._wanted(kept, entry.id), self._computed.get(where)
            if where not in self._busy and (known is None or self._is_due(kept, entry, known, shards)):
                self._due[where] = (kept, entry, shards)

    def _is_due(self, kept: DocumentSet, entry: DocumentEntry, known: _Computed, shards: int) -> bool:
        if known.digest != entry.digest:
            return True
        if not known.prefix:
            return self._now() >= known.again_at
        return known.shards < shards or known.until < kept.expires_at or not self._is_kept(kept, known)

    async def _work(self) -> None:
        """Compute what is due, one document after another."""
        while not self._is_closing:
            while not self._due:
                self._has_due.clear()
                await self._has_due.wait()
            where = next(iter(self._due))
            kept, entry, shards = self._due.pop(where)
            self._busy.add(where)
            try:
                await self._compute(kept, entry, shards)
            except Unavailable as error:
                _log.warning("document sets wait: %s", error.message)
            finally:
                self._busy.discard(where)

    async def _compute(self, kept: DocumentSet, entry: DocumentEntry, shards: int) -> None:
        tenant, text = self._tenant_of(kept.tenant), await self._store.texts(kept, [entry.id])
        if tenant is None or entry.id not in text:
            return
        where, left_s = (*kept.key, entry.id), kept.expires_at - self._now()
        before = self._computed.get(where)
        try:
            ask = self._ask_of(kept, AskDocument(entry.id, text[entry.id], entry.title))
            prefix = await self._prefixes.keep(ask, tenant, shards=shards, ttl_s=max(1.0, left_s))
        except ExpectedError as error:
            self._computed[where] = _Computed(entry.digest, again_at=self._now() + _AGAIN_S)
            note = Note(trouble=error.public_message[:_MOST_TROUBLE], digest=entry.digest)
        else:
            self._computed[where] = _Computed(entry.digest, prefix.id, shards, kept.expires_at)
            note = Note(prefix.id, digest=entry.digest)
            if before is not None and before.prefix not in ("", prefix.id):
                await self._unpin(tenant.name, before.prefix)
        await self._store.note(kept.key, {entry.id: note})
        if await self._store.revision(kept.key) != kept.revision:
            # the document may be in no set any more
            self._changed.set()

    async def _end_others(self, alive: Sequence[DocumentSet]) -> None:
        """End the pins of documents that are in no set any more."""
        there = {(*kept.key, entry.id) for kept in alive for entry in kept.entries}
        for where in [where for where in self._computed if where not in there]:
            gone = self._computed.pop(where)
            if gone.prefix and all(gone.prefix != other.prefix for other in self._computed.values()):
                await self._unpin(where[0], gone.prefix)

    async def _unpin(self, tenant: str, prefix: str) -> None:
        try:
            await self._prefixes.drop(tenant, prefix)
        except UnknownPrefix:
            return

    def _wanted(self, kept: DocumentSet, document: str) -> int:
        """On how many backends `document` should be: a share of all, as large as that of the set's requests that use
        it, if the client left that open.
        """
        if kept.shards != AUTO:
            return kept.shards
        counted, backends = self._counted.get(kept.key), max(1, self._backends_of(kept.model))
        if counted is None or not counted.requests:
            return 1
        share = counted.of_document.get(document, 0.0) / counted.requests
        return max(1, min(backends, math.ceil(share * backends)))

    def _is_kept(self, kept: DocumentSet, known: _Computed) -> bool:
        try:
            self._prefixes.get(kept.tenant, known.prefix)
        except UnknownPrefix:
            return False
        return True

    def _state(self, kept: DocumentSet, note: Note | None) -> str:
        if not kept.model:
            return "stored"
        if note is not None and note.trouble:
            return "failed"
        if note is None:
            return "waiting"
        try:
            return self._prefixes.get(kept.tenant, note.prefix).state
        except UnknownPrefix:
            return "waiting"

    async def _require_room(self, kept: DocumentSet, tenant: Tenant) -> None:
        """Raise QuotaExceeded if `tenant` would store more than it may."""
        others = [other for other in await self.of(tenant.name) if other.name != kept.name]
        documents = len(kept.entries) + sum(len(other.entries) for other in others)
        size = kept.size + sum(other.size for other in others)
        if documents > tenant.stored_documents or size > tenant.stored_bytes:
            most = f"{tenant.stored_documents:,} documents of {tenant.stored_bytes:,} bytes, its limit"
            raise QuotaExceeded(
                f"tenant '{tenant.name}' would store {documents:,} documents of {size:,} bytes, more than {most}",
                hint="DELETE a set or documents, or wait until one expires",
            )

    async def _change(self, key: Key, changed: Callable[[DocumentSet | None], Awaitable[_Change]]) -> DocumentSet:
        """Store what `changed` makes of the set of this key: again if another router has changed one of the tenant's
        sets meanwhile, so that no change is lost and no tenant stores more than it may. Raises what `changed` raises,
        Unavailable.
        """
        tenant, name = key
        async with self._turn_of(tenant):
            for _ in range(_MOST_TRIES):
                # first this number, then what it stands for
                after = await self._store.changes(tenant)
                kept, texts = await changed(await self._fresh(key))
                if await self._store.put(kept, texts, after=after):
                    self._forget(key)
                    self._changed.set()
                    return kept
        raise _keeps_changing(name)

    @asynccontextmanager
    async def _turn_of(self, tenant: str) -> AsyncIterator[None]:
        """One change of a tenant's sets at a time here: each that fails for another one has read all its texts."""
        if tenant in self._changing:
            try:
                await self._waiters.wait(tenant, None, timeout_s=_TURN_S)
            except TimeoutError:
                raise _keeps_changing("of this tenant") from None
        else:
            self._changing.add(tenant)
        try:
            yield
        finally:
            self._end_turn(tenant)

    def _end_turn(self, tenant: str) -> None:
        self._changing.discard(tenant)
        self._waiters.serve(self._begin_turn)

    def _begin_turn(self, waiter: Waiter[str, None, bool]) -> bool | None:
        if waiter.owner in self._changing:
            return None
        self._changing.add(waiter.owner)
        return True

    async def _known(self, key: Key, *, may_be_old: bool = False) -> DocumentSet:
        """The set of this key. While the store is away, one that is remembered will do if it `may_be_old`."""
        try:
            kept = await self._fresh(key)
        except Unavailable:
            kept = self._remembered.get(key) if may_be_old else None
            if kept is None:
                raise
        return self._required(kept, key[1])

    def _required(self, kept: DocumentSet | None, name: str) -> DocumentSet:
        """`kept`, which is called `name`. Raises UnknownDocument if there is none, or it has expired."""
        if kept is None or kept.expires_at <= self._now():
            hint = "GET /v1/document_sets lists yours"
            raise UnknownDocument(f"there is no document set '{name[:80]}', or it has expired", hint=hint)
        return kept

    async def _fresh(self, key: Key) -> DocumentSet | None:
        """The set as it is stored now, read again only if it has changed."""
        revision, known = await self._store.revision(key), self._remembered.get(key)
        if known is None or known.revision != revision:
            self._forget(key)
            known = await self._store.look(key) if revision else None
            if known is not None:
                self._remembered[key] = known
                while len(self._remembered) > _MOST_REMEMBERED:
                    self._forget(next(iter(self._remembered)))
        return known

    async def _texts_of(self, kept: DocumentSet, names: Sequence[str]) -> dict[str, str]:
        found = dict[str, str]()
        for name in names:
            where = (kept.key, kept.version, name)
            if where in self._texts:
                self._texts.move_to_end(where)
                found[name] = self._texts[where]
        missing = [name for name in names if name not in found]
        for name, text in (await self._store.texts(kept, missing) if missing else {}).items():
            found[name] = text
            self._cache((kept.key, kept.version, name), text)
        return found

    def _cache(self, where: tuple[Key, int, str], text: str) -> None:
        if where not in self._texts:
            self._texts[where] = text
            self._cached_bytes += len(text)
        while self._cached_bytes > _MOST_CACHED_BYTES:
            _, oldest = self._texts.popitem(last=False)
            self._cached_bytes -= len(oldest)

    def _forget(self, key: Key) -> None:
        self._remembered.pop(key, None)

    def _revision(self, before: DocumentSet | None) -> int:
        """A revision later than that of `before` and than all that this router made: Unix time in µs, or more."""
        least = self._last_revision + 1 if before is None else max(self._last_revision, before.revision) + 1
        self._last_revision = max(round(self._now() * 1e6), least)
        return self._last_revision

    async def _store_uses(self, key: Key) -> None:
        counted = self._counted.get(key)
        if counted is None:
            return
        new, counted.new = counted.new, {}
        if new:
            await self._store.count(key, new)
        # half of what was used counts after some hundred turns
        counted.requests *= _FADE
        counted.of_document = {name: uses * _FADE for name, uses in counted.of_document.items() if uses > _LEAST_USES}
        if counted.requests < _LEAST_USES:
            del self._counted[key]


_FADE = 0.998
"""Share of what was used that still counts after one turn: half of it after half an hour."""

_LEAST_USES = 0.01


def _entry(document: AskDocument) -> DocumentEntry:
    encoded = document.text.encode("utf-8")
    digest = xxh3_64_intdigest(encoded + b"\x00" + document.title.encode("utf-8")) >> (64 - _DIGEST_BITS)
    return DocumentEntry(document.id, document.title, len(encoded), digest)


def _keeps_changing(name: str) -> Unavailable:
    hint = "look at the set, and try again"
    return Unavailable(
        f"other requests keep changing the document sets, '{name[:80]}' among them", hint=hint, retry_after_s=1.0
    )


def _unknown_documents(name: str, ids: Sequence[str]) -> UnknownDocument:
    shown = ", ".join(f"'{each[:40]}'" for each in ids[:4])
    hint = f"GET /v1/document_sets/{name[:80]} lists its documents"
    return UnknownDocument(f"the document set '{name[:80]}' has no document {shown}", hint=hint, param="documents")
