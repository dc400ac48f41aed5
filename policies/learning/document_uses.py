"""DocumentUses: which documents come often in a cache domain, and in which order a session had them last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HALF_LIFE_S = 1800.0
"""After this time, a use counts half."""

POPULAR_FROM = 1.5
"""Uses from which a document counts as popular: it was there at least twice. Others keep the client's order."""

_MOST_OF_DOMAIN = 4096
"""Documents that are remembered of one cache domain, and as many sessions."""

_MOST = 64 * 1024
"""Documents and sessions of all domains together."""


class Preferred(NamedTuple):
    """`places` are the numbers of a prompt's documents in the preferred order; the first `fixed` should stay there."""

    places: tuple[int, ...]
    fixed: int


@dataclass(slots=True)
class _Domain:
    """`uses` are document -> (uses, the time of that count), `sessions` the documents that each had last; the newest
    come last.
    """

    uses: OrderedDict[int, tuple[float, float]] = field(default_factory=OrderedDict)
    sessions: OrderedDict[str, tuple[int, ...]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.uses) + len(self.sessions)

    def count(self, document: int, now: float) -> float:
        """The uses of `document`, those of long ago for less."""
        uses, at = self.uses.get(document, (0.0, now))
        return float(uses * 0.5 ** (max(0.0, now - at) / HALF_LIFE_S))


class DocumentUses:
    """Documents are known by a hash of their text. Each domain has its own, so no tenant learns of another's.

    Domains are known by the root of their keys, which is of one model too; those that were used last stay.
    """

    def __init__(self) -> None:
        self._domains: OrderedDict[int, _Domain] = OrderedDict()
        self._size = 0

    def __repr__(self) -> str:
        return f"<DocumentUses {self._size} documents and sessions of {len(self._domains)} domains>"

    def preferred(
        self, root: int, documents: Sequence[int], session: str | None, now: float, *, leading: int = 0
    ) -> Preferred:
        """The order of `documents`, which come in the client's order, for prompts of which nothing is cached.

        The first `leading` stay in front.

        In a session, the documents that it had last begin in the same order. Popular ones follow, the most popular
        first, because more prompts then begin alike; then the others in the client's order.
        """
        if leading:
            rest = self.preferred(root, documents[leading:], session, now).places
            first = tuple(range(len(documents)))[:leading]
            return Preferred((*first, *(leading + place for place in rest)), len(first))
        domain = self._domains.get(root)
        if domain is None:
            return Preferred(tuple(range(len(documents))), 0)
        place_of = {document: place for place, document in enumerate(documents)}
        last = () if session is None else domain.sessions.get(session, ())
        kept, fixed = [place_of[document] for document in last if document in place_of], 0
        while fixed < len(last) and last[fixed] in place_of:
            fixed += 1
        counts = [domain.count(document, now) for document in documents]
        others = sorted(
            set(range(len(documents))).difference(kept),
            key=lambda place: (-counts[place] if counts[place] >= POPULAR_FROM else 0.0, place),
        )
        return Preferred((*kept, *others), fixed)

    def used(self, root: int, documents: Sequence[int], session: str | None, now: float) -> None:
        """A prompt has `documents` in this order."""
        domain = self._domains.get(root)
        if domain is None:
            domain = self._domains[root] = _Domain()
        self._domains.move_to_end(root)
        before = len(domain)
        for document in documents:
            domain.uses[document] = (domain.count(document, now) + 1.0, now)
            domain.uses.move_to_end(document)
        if session is not None:
            domain.sessions[session] = tuple(documents)
            domain.sessions.move_to_end(session)
        for known in (domain.uses, domain.sessions):
            while len(known) > _MOST_OF_DOMAIN:
                known.popitem(last=False)
        self._size += len(domain) - before
        while self._size > _MOST:
            _, oldest = self._domains.popitem(last=False)
            self._size -= len(oldest)

    def forget(self, roots: Iterable[int]) -> None:
        """Forget the documents and sessions of the domains of `roots`."""
        for root in roots:
            self._size -= len(self._domains.pop(root, _Domain()))

    def check(self) -> None:
        """Assert that sizes are right and within their bounds."""
        assert self._size == sum(map(len, self._domains.values())) <= _MOST, f"{self!r}: miscounted"
        for domain in self._domains.values():
            assert max(len(domain.uses), len(domain.sessions)) <= _MOST_OF_DOMAIN, f"{self!r}: over its bound"
