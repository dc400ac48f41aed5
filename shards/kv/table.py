"""The blocks of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shards.kv.keys import BLOCK_TOKENS
from shards.kv.pool import BlockPool
from shards.kv.prefix import CachedBlock


def blocks_for(tokens: int) -> int:
    """The number of blocks that hold the KV of `tokens` positions."""
    return -(-tokens // BLOCK_TOKENS)


class BlockTable:
    """The blocks of one sequence's KV, in order, and the cached ones among them.

    `path` are the cached blocks, always the first ones. `is_chained` turns False when a block could not be cached:
    nothing behind it can then be cached or found. `rank` is the rank of the sequence's class, 0 the best: it decides
    how long its blocks stay cached afterwards, and may be changed at any time.

    A parked table has its KV in the host tier and no device block: it can be unparked or released.

    If layers with a window have pages of their own, the table holds those of its blocks from `first_page` on. Pages of
    blocks that were cached already, when it came to them, have proven that they are found again.
    """

    def __init__(self, pool: BlockPool, domain: str, *, rank: int = 0) -> None:
        self.pool, self.domain, self.rank = pool, domain, rank
        self.path: list[CachedBlock] = []
        self.is_chained = True
        self.first_page = 0
        self._proven = 0
        self._known: list[CachedBlock] = []
        self._blocks: list[int] = []
        self._ids: tuple[int, ...] | None = ()
        self._slots: list[int] | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        parked = "" if self._slots is None else f", {len(self._slots)} parked"
        return f"BlockTable({len(self._blocks)} blocks, {len(self.path)} cached{parked})"

    @property
    def ids(self) -> tuple[int, ...]:
        """The block ids, first to last. The same object until the table changes."""
        if self._ids is None:
            self._ids = tuple(self._blocks)
        return self._ids

    @property
    def paged(self) -> list[int]:
        """The blocks with pages that it holds."""
        return self._blocks[self.first_page :]

    @property
    def tip(self) -> CachedBlock | None:
        """The last cached block; None before the first."""
        return self.path[-1] if self.path else None

    @property
    def is_parked(self) -> bool:
        """Whether the KV is in the host tier."""
        return self._slots is not None

    @property
    def is_landed(self) -> bool:
        """Whether all KV is on the device. Nothing may be computed while a copy from the host is unfinished."""
        return self._slots is None and self.pool.has_landed(self._blocks)

    def follow(self, tokens_of: Callable[[int], bytes], *, limit: int) -> int:
        """Share the cached blocks that continue this table, up to `limit` blocks in total; returns the number added.

        All blocks so far must be full and cached. Blocks in the host tier are copied back, as far as there is room.
        """
        if self.is_parked or not self.is_chained or len(self.path) != len(self._blocks):
            return 0
        had = len(self._blocks)
        path = self._find(tokens_of, limit=limit)
        for cached in path[had:]:
            if cached.block is None:
                break
            self._blocks.append(self.pool.share(cached))
        rest = path[len(self._blocks) :]
        if rest:
            self._blocks += self.pool.restore(rest, after=self._blocks[-1] if self._blocks else None)
        if len(self._blocks) > had:
            self.path, self._ids = path[: len(self._blocks)], None
            self._take_pages(had)
        return len(self._blocks) - had

    def grow(self, tokens: int) -> None:
        """Make room for `tokens` positions in total. Raises OutOfBlocks."""
        assert not self.is_parked, "a parked table does not grow"
        missing = blocks_for(tokens) - len(self._blocks)
        if missing > 0:
            after = self._blocks[-1] if self._blocks else None
            self._blocks += self.pool.take(missing, after=after, domain=self.domain)
            self._ids = None

    def store(self, tokens_of: Callable[[int], bytes], *, computed_tokens: int) -> None:
        """Cache every full block among the first `computed_tokens` positions that is not cached yet."""
        while self.is_chained and len(self.path) < computed_tokens // BLOCK_TOKENS:
            at = len(self.path)
            cached = self.pool.store(self._blocks[at], self.tip, tokens_of(at), domain=self.domain)
            if cached is None:
                self.is_chained = False
            else:
                self.path.append(cached)
                if cached.block is not None and cached.block != self._blocks[at]:
                    self._blocks[at], self._ids = cached.block, None
                    self._proven = max(self._proven, at + 1)

    def slide(self, computed_tokens: int) -> None:
        """Give back the pages that the token behind the first `computed_tokens` does not see, and none behind it."""
        windows = self.pool.windows
        if windows is None:
            return
        first = min(windows.window.first_seen(computed_tokens), len(self._blocks))
        if first > self.first_page:
            proven = max(self.first_page, min(first, self._proven))
            windows.leave(self._blocks[self.first_page : proven])
            windows.leave(self._blocks[proven:first], is_cold=True)
            self.first_page = first

    def park(self) -> bool:
        """Move all KV, including a partial last block, to the host tier, and release the device blocks.

        False, and nothing changed, if there is no room.
        """
        assert not self.is_parked, "a table cannot be parked twice"
        slots = self.pool.park(self.path, self._blocks, rank=self.rank)
        if slots is None:
            return False
        self._slots, self._blocks, self._ids = slots, [], ()
        return True

    def unpark(self) -> None:
        """Take device blocks and start copying the KV back; it is there once `is_landed`. Raises OutOfBlocks."""
        assert self._slots is not None, "only a parked table can be unparked"
        self._blocks = self.pool.unpark(self.path, self._slots, domain=self.domain)
        self._slots, self._ids = None, None

    def unchain(self) -> None:
        """Treat all blocks as uncached, after the pool was cleared. Parked tables need this too."""
        self.path, self.is_chained = [], False

    def distrust(self) -> None:
        """Uncache the blocks that only this sequence holds: their KV may be wrong."""
        if not self.is_parked:
            self.pool.distrust(self.path)
        self.unchain()

    def release(self) -> None:
        """Release all blocks, including parked ones."""
        if self._slots is not None:
            self.pool.forsake(self._slots)
        if self.pool.windows is not None:
            self.pool.windows.leave(self.paged)
        self.pool.release(self._blocks, rank=self.rank)
        self._blocks, self.path, self._ids, self._slots = [], [], (), None
        self.first_page, self._proven, self._known = 0, 0, []

    def check(self) -> None:
        """Assert that the cached blocks are the table's first ones, linked in order, and that it holds them."""
        places: Sequence[int] = self._blocks if self._slots is None else self._slots
        assert not (self._slots is not None and self._blocks), "a parked table holds device blocks"
        path = [cached.block if self._slots is None else cached.slot for cached in self.path]
        assert path == list(places[: len(path)]), "table and path disagree"
        is_held = self.pool.is_held if self._slots is None else self.pool.host.is_held
        assert all(map(is_held, places)), "a table lists a block that it does not hold"
        parents: list[CachedBlock | None] = [None, *self.path]
        for parent, cached in zip(parents, self.path, strict=False):
            assert cached.parent is parent, "a path is broken"
            assert cached.domain == self.domain, "a table holds another domain's block"
            assert cached in self.pool.prefix, "a held block was evicted"
        assert len(set(places)) == len(places), "a table holds a block twice"
        windows = self.pool.windows
        assert windows is None or all(map(windows.has, self.paged)), "a block that is seen has no page"

    def _find(self, tokens_of: Callable[[int], bytes], *, limit: int) -> list[CachedBlock]:
        """The longest cached path of up to `limit` blocks that begins with this table's, and can be read at its end."""
        had, windows = len(self.path), self.pool.windows
        path = self._known
        # what was found and lacks pages is not looked up again in every step
        if windows is None or len(path) < had or (had and path[had - 1] is not self.path[-1]):
            path = list(self.path)
        self.pool.prefix.extend_path(path, tokens_of, limit=limit, domain=self.domain)
        if windows is None:
            return path
        self._known = path
        return path[: max(had, windows.reach(path[:limit]))]

    def _take_pages(self, had: int) -> None:
        """Hold the pages that the next token sees among the blocks behind the first `had`, which were cached."""
        windows = self.pool.windows
        if windows is None:
            return
        first = windows.window.first_seen(len(self._blocks) * BLOCK_TOKENS)
        windows.hold(self._blocks[max(first, had) :])
        windows.leave(self._blocks[self.first_page : min(first, had)])
        self.first_page, self._proven = max(first, self.first_page), len(self._blocks)
