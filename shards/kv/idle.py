"""The order in which idle cached blocks are evicted. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from shards.kv.keys import BLOCK_TOKENS
from shards.kv.prefix import CachedBlock

RANK_TURNS = 16.0
"""Turnovers of the pool that one rank is worth: of two blocks a rank apart, last used within nine turnovers of each
other, the one of better rank stays, whatever they cost."""

MOST_COST = 8.0
"""The most turnovers that recompute cost is worth: half a rank, so that cost decides within a rank only."""


def recompute_cost(depth: int, doubling_tokens: int) -> float:
    """The cost of computing the block behind `depth` others again, in units of the first block; at most 8.

    Each token of a block is multiplied with all weights (the same for every block) and attends to all tokens before it
    (in proportion to its position). `doubling_tokens` is the position at which both parts cost the same: on an H200
    with Llama-3.1-8B about 27,000 (17.7 us a token at position 0, 100 us at 128k).
    """
    return min(MOST_COST, 1.0 + depth * BLOCK_TOKENS / doubling_tokens)


class IdleBlocks:
    """The cached blocks of one tier that are not held: the least worth is evicted first, children before parents.

    Worth is time of last use + recompute cost - 16 * rank, the highest over all uses. Time is counted in turnovers of
    the pool: blocks taken so far, divided by the pool's size. So the order follows the rank of the best class that used
    a block lately (rank 0 is the best). Within a rank the longest unused block goes first, and a block that is
    expensive to recompute counts as used later. A rank fades: 16 turnovers without use count as one rank less.

    This is GreedyDual (N. Young, The k-server dual and loose competitiveness for paging, 1994; with sizes:
    P. Cao and S. Irani, Cost-aware WWW proxy caching algorithms, 1997), except for its clock. There the clock is the
    worth of the last evicted block. If costs are nearly equal it stands still for a whole turnover, and the order would
    then follow cost alone.

    Only blocks without children in the tier are in a heap, so a parent never comes before its child; a parent enters
    as its last child leaves. O(log n) for each. Blocks of the domains in `apart` have heaps of their own, so that
    they can be passed over.
    """

    def __init__(self, apart: Iterable[str] = ()) -> None:
        self._heaps: dict[str | None, list[tuple[float, int, CachedBlock]]] = {None: [], **{name: [] for name in apart}}
        self._counts: dict[str | None, int] = dict.fromkeys(self._heaps, 0)
        # the number of a member's entry in its heap, or None while it has children; other entries are stale
        self._entries: dict[CachedBlock, int | None] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._entries)

    def __contains__(self, cached: CachedBlock) -> bool:
        return cached in self._entries

    def __repr__(self) -> str:
        return f"IdleBlocks({len(self)} blocks, {sum(map(len, self._heaps.values()))} entries)"

    def count(self, group: str | None) -> int:
        """The number of blocks of a domain that is kept apart; None: of all other domains."""
        return self._counts[group]

    def add(self, cached: CachedBlock, *, is_leaf: bool) -> None:
        """Add `cached`, which is idle from now on; it becomes evictable once it `is_leaf`."""
        assert cached not in self._entries, "a block is idle once"
        self._entries[cached] = None
        self._counts[self._group(cached)] += 1
        if is_leaf:
            self.ripen(cached)

    def ripen(self, cached: CachedBlock) -> None:
        """Make `cached`, a member, evictable: it has no children in this tier any more."""
        heap = self._heaps[self._group(cached)]
        self._pushed += 1
        self._entries[cached] = self._pushed
        heappush(heap, (cached.worth, self._pushed, cached))
        if len(heap) > 2 * len(self._entries) + 64:
            heap[:] = [entry for entry in heap if self._entries.get(entry[2]) == entry[1]]
            heapify(heap)

    def remove(self, cached: CachedBlock) -> None:
        """Remove `cached`. No error if it is not a member."""
        if cached in self._entries:
            del self._entries[cached]
            self._counts[self._group(cached)] -= 1

    def is_ripe(self, cached: CachedBlock) -> bool:
        """Whether `cached` is a member without children in this tier."""
        return self._entries.get(cached) is not None

    def least(self, groups: Iterable[str | None] = (None,)) -> CachedBlock | None:
        """The ripe block of least worth among `groups`; None if they have none."""
        tops = [heap[0] for group in groups if (heap := self._settled(group))]
        return min(tops)[2] if tops else None

    def check(self) -> None:
        """Assert that members are counted, and that each ripe member has its entry."""
        counts = dict.fromkeys(self._counts, 0)
        for cached in self._entries:
            counts[self._group(cached)] += 1
        assert counts == self._counts, "idle blocks are miscounted"
        entries = {(cached, number) for heap in self._heaps.values() for _, number, cached in heap}
        ripe = {(cached, number) for cached, number in self._entries.items() if number is not None}
        assert ripe <= entries, "a ripe block could not be evicted"

    def _group(self, cached: CachedBlock) -> str | None:
        return cached.domain if cached.domain in self._heaps else None

    def _settled(self, group: str | None) -> list[tuple[float, int, CachedBlock]]:
        """The heap of `group`, after removing stale entries from its top."""
        heap = self._heaps[group]
        while heap and self._entries.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        return heap
