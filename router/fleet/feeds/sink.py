"""Where feeds end: whoever keeps an index of what engines hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backends.base import rank_name
from backends.events.nouns import CacheEvent


@dataclass(frozen=True, slots=True)
class Source:
    """One cache: that of a backend's data-parallel `rank`. Its hashes mean nothing in any other."""

    backend: str
    rank: int = 0

    def __str__(self) -> str:
        return rank_name(self.backend, self.rank)


class EventSink(Protocol):
    """Hears what each source's cache holds, in order.

    After Cleared, and before the first event, a source holds nothing that anybody knows of. Events may name blocks that
    the sink never heard of: a parent that was stored earlier (what continues it cannot be named), or one that leaves.
    """

    def hear(self, source: Source, event: CacheEvent) -> None:
        """`source` says `event`."""
        ...

    def forget(self, backend: str) -> None:
        """`backend` is no longer there, and nothing more is heard of its sources."""
        ...
