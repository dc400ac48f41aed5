"""The ownership of the pages that hold the KV of layers with a window. Torch-free."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shards.kv.extents import FreeBlocks
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.prefix import CachedBlock
from shards.kv.window_layout import KvLayout, KvWindow


class WindowPages:
    """The pages of `layout`, by block: a page holds the positions of one block.

    A page is free, held (by the tables with a next token that sees it) or idle: its block is still there, and the page
    stays with it until another block needs it. Idle pages are evicted in the order in which they became idle, those
    that came back `cold` before all others, the latest first. `is_pinned` tells whether a block is pinned: its page is
    evicted only if there is no other.

    `of_blocks` [blocks + 1] has the page of each block, or the number of pages for a block without one. The last entry
    is for padding.
    """

    def __init__(self, layout: KvLayout, is_pinned: Callable[[int], bool]) -> None:
        assert layout.window is not None, "an undivided layout has no pages"
        self.window: KvWindow = layout.window
        self.size, self._chunk_tokens, self._is_pinned = layout.pages, layout.chunk_tokens, is_pinned
        self.of_blocks: npt.NDArray[np.int32] = np.full(layout.blocks + 1, self.size, dtype=np.int32)
        self._free = FreeBlocks(self.size)
        self._holders: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"WindowPages({len(self._free)} free, {len(self._idle)} idle, {len(self._holders)} held of {self.size})"

    @property
    def available(self) -> int:
        """Pages that `give` could give: free or idle."""
        return len(self._free) + len(self._idle)

    def claim(self, final_tokens: int, *, is_decoding: bool) -> int:
        """The most pages that a sequence can hold that ends with `final_tokens` positions."""
        most = self.window.pages(1 if is_decoding else self._chunk_tokens)
        return min(most, -(-final_tokens // BLOCK_TOKENS))

    def has(self, block: int) -> bool:
        """Whether `block` has a page."""
        return bool(self.of_blocks[block] != self.size)

    def reach(self, path: Sequence[CachedBlock], *, unit: int = 1) -> int:
        """How many blocks of `path`, a multiple of `unit`, end where a token finds a page for all that it sees."""
        end = len(path) - len(path) % unit
        while end:
            first = self.window.first_seen(end * BLOCK_TOKENS)
            lacking = next((at for at in reversed(range(first, end)) if not self._holds(path[at])), None)
            if lacking is None:
                return end
            end = lacking - lacking % unit
        return 0

    def give(self, blocks: Sequence[int], *, after: int | None = None) -> None:
        """Give each of `blocks`, which have none, a page, held once; consecutive behind that of `after` if possible.

        There must be so many `available`.
        """
        while len(self._free) < len(blocks):
            self._evict()
        behind = None if after is None or not self.has(after) else int(self.of_blocks[after])
        for block, page in zip(blocks, self._free.take(len(blocks), after=behind), strict=True):
            self.of_blocks[block] = page
            self._holders[block] = 1

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a hold on the pages of `blocks`, which have one."""
        for block in blocks:
            assert self.has(block), "a page is held that is not there"
            self._idle.pop(block, None)
            self._holders[block] += 1

    def leave(self, blocks: Iterable[int], *, is_cold: bool = False) -> None:
        """End one hold on the pages of `blocks`, which are idle after the last one."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._idle[block] = None
                self._idle.move_to_end(block, last=not is_cold)

    def move(self, block: int, into: int) -> None:
        """Let `into`, which holds the same tokens, have the page of `block`, with its hold; one of two pages stays."""
        if not self.has(block):
            return
        is_held = self._holders.pop(block, 0) > 0
        self._idle.pop(block, None)
        page, self.of_blocks[block] = int(self.of_blocks[block]), self.size
        if self.has(into):
            self._free.give(page)
            if is_held:
                self.hold([into])
            return
        self.of_blocks[into] = page
        if is_held:
            self._holders[into] = 1
        else:
            self._idle[into] = None

    def forget(self, block: int) -> None:
        """Free the page of `block`, if it has one: the block is free."""
        if self.has(block):
            assert block not in self._holders, "a free block has a page in use"
            del self._idle[block]
            self._free.give(int(self.of_blocks[block]))
            self.of_blocks[block] = self.size

    def check(self, held: Iterable[Sequence[int]] | None = None) -> None:
        """Assert that no page is lost or has two blocks. With `held` (blocks of each holder), that these hold them."""
        self._free.check()
        blocks = np.flatnonzero(self.of_blocks != self.size).tolist()
        pages = [*self._free.ids(), *self.of_blocks[blocks].tolist()]
        assert sorted(pages) == list(range(self.size)), "a page is lost or has two blocks"
        assert sorted([*self._idle, *self._holders]) == blocks, "a page is neither idle nor held, or both"
        assert all(count > 0 for count in self._holders.values()), "a held page has no holder"
        if held is not None:
            assert Counter(block for each in held for block in each) == self._holders, "holders of pages are miscounted"

    def _holds(self, cached: CachedBlock) -> bool:
        return cached.block is not None and self.has(cached.block)

    def _evict(self) -> None:
        for _ in range(len(self._idle)):
            block = next(iter(self._idle))
            if not self._is_pinned(block):
                break
            self._idle.move_to_end(block)
        self.forget(next(iter(self._idle)))
