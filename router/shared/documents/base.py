"""The Protocol for storing document sets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from router.shared.documents.document_set import DocumentSet, Key, Note, Texts, Uses


class SetStore(Protocol):
    """Stores document sets by tenant and name. Every call raises Unavailable if the store cannot be reached."""

    async def revision(self, key: Key) -> int:
        """The revision of this set; 0 if there is none."""
        ...

    async def look(self, key: Key) -> DocumentSet | None:
        """The set of this key; None if there is none."""
        ...

    async def all(self) -> list[DocumentSet]:
        """All sets of all tenants, those that have expired included."""
        ...

    async def changes(self, tenant: str) -> int:
        """A number that grows with each change of a set of `tenant`; 0 before the first."""
        ...

    async def put(self, kept: DocumentSet, texts: Texts | None, *, after: int) -> bool:
        """Store `kept` with the `texts` of its version, or None: those of this version are stored.

        False, and nothing is changed, unless `after` is still the number of its tenant's `changes`.
        """
        ...

    async def texts(self, kept: DocumentSet, ids: Collection[str]) -> dict[str, str]:
        """The texts of the documents `ids` in this version of the set; those that are gone are left out."""
        ...

    async def drop(self, kept: DocumentSet) -> bool:
        """Remove the set, its texts, notes and uses. False, and nothing is changed, if another revision is stored."""
        ...

    async def note(self, key: Key, notes: Mapping[str, Note]) -> None:
        """Store what became of these documents, if there is the set."""
        ...

    async def notes(self, key: Key) -> dict[str, Note]:
        """What became of each document."""
        ...

    async def count(self, key: Key, uses: Mapping[str, Uses]) -> None:
        """Add to the uses of documents."""
        ...

    async def uses(self, key: Key) -> dict[str, Uses]:
        """The uses of each document."""
        ...

    async def leads(self, by: str, for_s: float) -> bool:
        """Whether the router `by` is the one that has documents computed, for `for_s` from now on."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
