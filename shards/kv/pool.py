"""Who may use which KV block. Torch-free: the memory itself is `shards.kv.cache`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from shards.kv.extents import FreeBlocks
from shards.kv.prefix import CachedBlock, PrefixCache


class OutOfBlocks(Exception):
    """More blocks are wanted than are free or evictable."""


class BlockPool:
    """Owns every KV block of one shard and says who may use it.

    A block is in exactly one place: free, idle (cached, without an owner, evictable, longest unused first) or owned
    (counted holders). Whoever holds a cached block holds its parents too, and lets go of them last: so the longest
    unused idle block never has a cached child, and every idle block can be evicted.
    """

    def __init__(self, size: int, *, model: str) -> None:
        self.size = size
        self.prefix = PrefixCache(model)
        self._free = FreeBlocks(size)
        self._idle: OrderedDict[int, CachedBlock] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._cached: dict[int, CachedBlock] = {}

    def __repr__(self) -> str:
        return f"BlockPool({len(self._free)} free, {len(self._idle)} idle, {len(self._holders)} owned of {self.size})"

    @property
    def available(self) -> int:
        """Blocks that `take` could give: free or evictable."""
        return len(self._free) + len(self._idle)

    @property
    def owned(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    def is_held(self, block: int) -> bool:
        """Does anybody hold `block`?"""
        return block in self._holders

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """`count` blocks for a new owner, consecutive behind `after` where possible; evicts what was unused longest.

        Raises OutOfBlocks; nothing has changed then.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks are wanted and {self.available} of {self.size} are free or evictable")
        while len(self._free) < count:
            self._evict()
        taken = self._free.take(count, after=after)
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, cached: CachedBlock) -> int:
        """The block of `cached`, held once more. The caller holds its parents already."""
        assert cached in self.prefix, "only what is cached can be shared"
        self._idle.pop(cached.block, None)
        self._holders[cached.block] = self._holders.get(cached.block, 0) + 1
        return cached.block

    def store(self, block: int, parent: CachedBlock | None, token_ids: bytes, *, domain: str) -> CachedBlock | None:
        """Cache `block`, which the caller alone holds and has filled with `token_ids` behind `parent`.

        If an equal one is cached already, the caller's hold moves over to that one and `block` becomes free.
        None (and nothing changed) if the key is taken by other tokens or `parent` is cached no more.
        """
        assert self._holders[block] == 1, "a shared block is not the caller's to store"
        known = self.prefix.find(parent, token_ids, domain=domain)
        if known is not None:
            self.share(known)
            self.release([block])
            return known
        cached = self.prefix.add(block, parent, token_ids, domain=domain)
        if cached is not None:
            self._cached[block] = cached
        return cached

    def release(self, blocks: Sequence[int]) -> None:
        """End one hold on each of `blocks` (in their sequence's order): cached ones become idle, the rest free."""
        for block in reversed(blocks):
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
                continue
            del self._holders[block]
            cached = self._cached.get(block)
            if cached is None:
                self._free.give(block)
            else:
                self._idle[block] = cached

    def distrust(self, path: Sequence[CachedBlock]) -> None:
        """Uncache the end of `path`, which the caller holds, as far as nobody else holds or continues it."""
        for cached in reversed(path):
            if self._holders[cached.block] > 1 or cached.children:
                break
            self.prefix.remove(cached)
            del self._cached[cached.block]

    def clear(self) -> None:
        """Forget all that is cached. Blocks that are held stay with their holders, uncached."""
        for block in self._idle:
            self._free.give(block)
        self._idle.clear()
        self._cached.clear()
        self.prefix.clear()

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Prove that no block is lost or in two places; with `holders` (each one's blocks), that they are who holds."""
        self._free.check()
        self.prefix.check()
        places = [*self._free.ids(), *self._idle, *self._holders]
        assert sorted(places) == list(range(self.size)), "a block is lost or in two places"
        assert {cached.block: cached for cached in self.prefix} == self._cached, "pool and prefix cache disagree"
        assert all(self._cached.get(block) is cached for block, cached in self._idle.items()), (
            "an idle block is uncached"
        )
        age = {block: at for at, block in enumerate(self._idle)}
        for block, cached in self._cached.items():
            if cached.parent is not None and cached.parent.block in age:
                assert block in age, "a held block has an idle parent"
                assert age[block] < age[cached.parent.block], "a parent would be evicted before its child"
        assert all(count > 0 for count in self._holders.values()), "an owned block has no holder"
        if holders is not None:
            held = Counter(block for blocks in holders for block in blocks)
            assert held == Counter(self._holders), "holders are miscounted"

    def _evict(self) -> None:
        block, cached = self._idle.popitem(last=False)
        self.prefix.remove(cached)
        del self._cached[block]
        self._free.give(block)
