"""The Protocol of the receiver of cache events, such as an index of engines' blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backends.base import rank_name
from backends.events.nouns import CacheEvent


@dataclass(frozen=True, slots=True)
class RankCache:
    """One cache: that of a backend's data-parallel `rank`. Its block hashes have no meaning for another cache."""

    backend: str
    rank: int = 0

    def __str__(self) -> str:
        return rank_name(self.backend, self.rank)


class EventSink(Protocol):
    """Gets the events of each source's cache, in order.

    After Cleared, and before the first event, a source counts as empty. Events may name blocks that
    the sink never got: a parent that was stored earlier (its children cannot be named), or an evicted block.
    """

    def hear(self, source: RankCache, event: CacheEvent) -> None:
        """`source` says `event`."""
        ...

    def forget(self, backend: str) -> None:
        """`backend` has left, and its sources send nothing more."""
        ...
