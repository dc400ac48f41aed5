"""Document sets in the memory of one router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from router.shared.documents.document_set import DocumentSet, Key, Note, Texts, Uses


@dataclass(slots=True)
class _Stored:
    kept: DocumentSet
    texts: Texts
    notes: dict[str, Note] = field(default_factory=dict)
    uses: dict[str, Uses] = field(default_factory=dict)


class MemorySets:
    """A SetStore of this router alone: what it has is lost with it."""

    def __init__(self) -> None:
        self._sets: dict[Key, _Stored] = {}
        self._changes: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<MemorySets {len(self._sets)}>"

    async def revision(self, key: Key) -> int:
        return self._sets[key].kept.revision if key in self._sets else 0

    async def look(self, key: Key) -> DocumentSet | None:
        return self._sets[key].kept if key in self._sets else None

    async def all(self) -> list[DocumentSet]:
        return [stored.kept for stored in self._sets.values()]

    async def changes(self, tenant: str) -> int:
        return self._changes[tenant]

    async def put(self, kept: DocumentSet, texts: Texts | None, *, after: int) -> bool:
        if self._changes[kept.tenant] != after:
            return False
        self._changes[kept.tenant] += 1
        stored = self._sets.get(kept.key)
        if stored is None:
            self._sets[kept.key] = _Stored(kept, texts or {})
            return True
        stored.kept, stored.texts = kept, stored.texts if texts is None else texts
        ids = {entry.id for entry in kept.entries}
        stored.notes = {name: note for name, note in stored.notes.items() if name in ids}
        stored.uses = {name: uses for name, uses in stored.uses.items() if name in ids}
        return True

    async def texts(self, kept: DocumentSet, ids: Collection[str]) -> dict[str, str]:
        stored = self._sets.get(kept.key)
        if stored is None or stored.kept.version != kept.version:
            return {}
        return {name: stored.texts[name] for name in ids if name in stored.texts}

    async def drop(self, kept: DocumentSet) -> bool:
        stored = self._sets.get(kept.key)
        if stored is None or stored.kept.revision != kept.revision:
            return False
        self._changes[kept.tenant] += 1
        del self._sets[kept.key]
        return True

    async def note(self, key: Key, notes: Mapping[str, Note]) -> None:
        if key in self._sets:
            self._sets[key].notes.update(notes)

    async def notes(self, key: Key) -> dict[str, Note]:
        return dict(self._sets[key].notes) if key in self._sets else {}

    async def count(self, key: Key, uses: Mapping[str, Uses]) -> None:
        if key in self._sets:
            known = self._sets[key].uses
            known.update({name: known.get(name, Uses()) + more for name, more in uses.items()})

    async def uses(self, key: Key) -> dict[str, Uses]:
        return dict(self._sets[key].uses) if key in self._sets else {}

    async def leads(self, by: str, for_s: float) -> bool:  # noqa: ARG002 - there is no other router
        return True

    async def close(self) -> None:
        """Nothing is done here."""
