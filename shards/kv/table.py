"""The blocks of one sequence."""

from __future__ import annotations

from collections.abc import Callable

from shards.kv.keys import BLOCK_TOKENS
from shards.kv.pool import BlockPool
from shards.kv.prefix import CachedBlock


def blocks_for(tokens: int) -> int:
    """How many blocks hold the KV of `tokens` positions."""
    return -(-tokens // BLOCK_TOKENS)


class BlockTable:
    """Which blocks hold one sequence's KV, in order, and which of them are cached.

    `path` are the cached ones, always a beginning of `blocks`. `is_chained` turns False when a block could not be
    cached: nothing behind it can then be cached or found.
    """

    def __init__(self, pool: BlockPool, domain: str) -> None:
        self.pool, self.domain = pool, domain
        self.path: list[CachedBlock] = []
        self.is_chained = True
        self._blocks: list[int] = []
        self._ids: tuple[int, ...] | None = ()

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"BlockTable({len(self._blocks)} blocks, {len(self.path)} cached)"

    @property
    def ids(self) -> tuple[int, ...]:
        """The block ids, first to last. The same object until the table changes."""
        if self._ids is None:
            self._ids = tuple(self._blocks)
        return self._ids

    @property
    def tip(self) -> CachedBlock | None:
        """The last cached block; None before the first."""
        return self.path[-1] if self.path else None

    def follow(self, tokens_of: Callable[[int], bytes], *, limit: int) -> int:
        """Share the cached blocks that continue this table, up to `limit` blocks in all; says how many were added.

        All blocks so far must be full and cached.
        """
        if not self.is_chained or len(self.path) != len(self._blocks):
            return 0
        had = len(self._blocks)
        path = list(self.path)
        self.pool.prefix.extend_path(path, tokens_of, limit=limit, domain=self.domain)
        for cached in path[had:]:
            self._blocks.append(self.pool.share(cached))
        if len(path) > had:
            self.path, self._ids = path, None
        return len(path) - had

    def grow(self, tokens: int) -> None:
        """Make room for `tokens` positions in all. Raises OutOfBlocks."""
        missing = blocks_for(tokens) - len(self._blocks)
        if missing > 0:
            self._blocks += self.pool.take(missing, after=self._blocks[-1] if self._blocks else None)
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
                if cached.block != self._blocks[at]:
                    self._blocks[at], self._ids = cached.block, None

    def unchain(self) -> None:
        """Forget that any block is cached, for a pool that was cleared."""
        self.path, self.is_chained = [], False

    def distrust(self) -> None:
        """Uncache what this sequence alone holds: its KV may be wrong."""
        self.pool.distrust(self.path)
        self.unchain()

    def release(self) -> None:
        """Let go of all blocks."""
        self.pool.release(self._blocks)
        self._blocks, self.path, self._ids = [], [], ()

    def check(self) -> None:
        """Prove that the cached blocks are a beginning of the table, linked in order."""
        assert [cached.block for cached in self.path] == self._blocks[: len(self.path)], "table and path disagree"
        parents: list[CachedBlock | None] = [None, *self.path]
        for parent, cached in zip(parents, self.path, strict=False):
            assert cached.parent is parent, "a path is broken"
            assert cached.domain == self.domain, "a table holds another domain's block"
            assert cached in self.pool.prefix, "a held block was evicted"
        assert len(set(self._blocks)) == len(self._blocks), "a table holds a block twice"
