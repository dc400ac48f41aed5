"""The ownership of KV blocks. Torch-free: the memory itself is `shards.kv.cache`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from shards.kv.adapter_domain import adapter_digest, tenant_domain
from shards.kv.copier import Copier
from shards.kv.disk import DiskTier, KvDirectory
from shards.kv.extents import FreeBlocks
from shards.kv.hand_over import Batch, batches_of
from shards.kv.host import HostTier
from shards.kv.idle import RANK_TURNS, IdleBlocks, recompute_cost
from shards.kv.lending import KvLending, Lending
from shards.kv.options import PoolOptions
from shards.kv.peers import KvPeers, PeerTier
from shards.kv.pins import Pins
from shards.kv.prefix import CachedBlock, PrefixCache
from shards.kv.residents import Residents
from shards.kv.window_layout import KvLayout
from shards.kv.window_pages import WindowPages

PINNED_TURNS = 16.0
"""Turnovers of the pool that a pin is worth on disk and at another shard: as many as a rank."""

_MOST_EARLY = 8
"""Blocks that one eviction may take from the end of a chain, so that a decoding sequence finds consecutive ids."""


class OutOfBlocks(Exception):
    """More blocks were requested than are free or evictable."""


class BlockPool:
    """Owns every KV block of one shard and decides on its use.

    A block is in exactly one place: free, draining (free as soon as a copy has read it), idle (cached, without an
    owner, evictable), kept (the same, but pinned) or owned (counted holders). A holder of a cached block also holds its
    parents, so every idle block becomes evictable in time. `shards.kv.idle` defines the order.

    A cached block that leaves the device goes to the host tier if that has room or a block of less worth, and comes
    back when it is matched. From there it is written to the disk tier, if there is one. Pins and floors never keep
    `guaranteed` blocks: a request that needs no more than that can always start once others have finished.

    With a divided `layout` the KV of layers with a window is in `windows`, and there is no other tier.
    """

    def __init__(
        self,
        size: int,
        *,
        model: str,
        options: PoolOptions | None = None,
        copier: Copier | None = None,
        directory: KvDirectory | None = None,
        peers: KvPeers | None = None,
        lending: KvLending | None = None,
        layout: KvLayout | None = None,
    ) -> None:
        self.size, self.options = size, options or PoolOptions()
        self.guaranteed = self.options.guaranteed(size)
        self.prefix = PrefixCache(model)
        self.pins = Pins(int(self.options.pin_share * size), self.prefix, self._settle_pinned)
        reserved = (directory.staging if directory else 0) + (lending.staging if lending else 0)
        self.host = HostTier(self.prefix, self.pins, copier, reserved=reserved)
        self.disk = DiskTier(self.prefix, self.host, directory)
        self.peers = PeerTier(self.prefix, self.host, peers)
        self.lending = Lending(self.prefix, self.host, lending)
        self._free = FreeBlocks(size)
        self._draining: set[int] = set()
        self._idle = IdleBlocks(self.options.floors)
        self._holders: dict[int, int] = {}
        self._cached = Residents()
        self._taken = 0
        self.windows: WindowPages | None = None
        if layout is not None and layout.window is not None:
            assert not self.host.size, "pages are not copied to the host"
            self.windows = WindowPages(layout, self._is_pinned)
        # early eviction would cost a small pool too much of its cache
        self._run_blocks = max(1, min(_MOST_EARLY, size // 64))

    def __repr__(self) -> str:
        return (
            f"BlockPool({len(self._free) + len(self._draining)} free, {len(self._idle)} idle, "
            f"{len(self.pins)} pinned, {len(self._holders)} owned of {self.size}; {self.host!r}, {self.disk!r})"
        )

    @property
    def available(self) -> int:
        """Blocks that `take` could give to any domain: free or evictable."""
        return self.available_for(None)

    def available_for(self, domain: str | None) -> int:
        """Blocks that `take` could give on behalf of `domain`, which may evict its own below its floor."""
        count = len(self._free) + len(self._draining) + self._idle.count(None)
        for name, floor in self.options.floors.items():
            idle = self._idle.count(name)
            count += idle if name == domain else min(idle, max(0, self._cached.of_domain[name] - floor))
        return count

    @property
    def owned(self) -> int:
        """Blocks that are held."""
        return len(self._holders)

    def is_held(self, block: int | None) -> bool:
        """Whether `block` is held."""
        return block in self._holders

    @property
    def free(self) -> int:
        """Blocks that `take` could give; if fewer pages are left, as large a share of all blocks as of the pages."""
        if self.windows is None:
            return self.available
        return min(self.available, self.size * self.windows.available // self.windows.size)

    def has_landed(self, blocks: Iterable[int]) -> bool:
        """Whether all of `blocks` can be read: not while a copy from the host is unfinished."""
        self._settle(self.host.flights.land())
        landing = self.host.flights.landing
        return not landing or landing.isdisjoint(blocks)

    def take(self, count: int, *, after: int | None = None, domain: str | None = None) -> list[int]:
        """`count` blocks for a new owner, consecutive behind `after` if possible; evicts on behalf of `domain`.

        An evicted block is copied to the host tier, if there is one, before it is given away; this waits for that.
        Raises OutOfBlocks; nothing has changed then.
        """
        room = self.available_for(domain)
        if count > room:
            raise OutOfBlocks(f"{count} blocks are wanted and {room} of {self.size} are free or evictable")
        if self.windows is not None and count > self.windows.available:
            raise OutOfBlocks(f"{count} pages are wanted, and there are these: {self.windows!r}")
        if after is not None and after + 1 not in self._free and len(self._free) < self.size // 32:
            # a run of its own for a sequence that grows in a full pool: 3 extents in 16 blocks beside 15 other
            # sequences, instead of 16
            self._evict(domain)
        self.make_room(count, domain=domain)
        assert len(self._free) + len(self._draining) >= count, "idle blocks cannot be evicted"
        while len(self._free) < count:
            self._settle(self.host.flights.wait())
        taken = self._free.take(count, after=after)
        if self.windows is not None:
            self.windows.give(taken, after=after)
        self._holders.update(dict.fromkeys(taken, 1))
        self._taken += count
        return taken

    def make_room(self, count: int, *, domain: str | None = None) -> None:
        """Evict until `count` blocks are free or about to be, or nothing more can be evicted.

        Called a step ahead, it lets the copies to the host run while the step computes.
        """
        self._settle(self.host.flights.land())
        while len(self._free) + len(self._draining) < count and self._evict(domain):
            pass
        self.host.flights.start()

    def share(self, cached: CachedBlock) -> int:
        """The device block of `cached`, with one more hold. The caller holds its parents already."""
        assert cached in self.prefix, "only a cached block can be shared"
        assert cached.block is not None, "only a block on the device can be shared"
        self._idle.remove(cached)
        self._holders[cached.block] = self._holders.get(cached.block, 0) + 1
        return cached.block

    def restore(self, path: Sequence[CachedBlock], *, after: int | None = None) -> list[int]:
        """Device blocks, held, for the beginning of `path`, as far as there is room; the copies to them have started.

        All of `path` is in the host tier only, and the caller holds the parents of its first block.
        """
        slots = [cached.slot for cached in path[: self.available_for(path[0].domain)] if cached.slot is not None]
        # held, so that evictions for room on the device do not take them
        for slot in slots:
            self.host.hold(slot)
        blocks = self._load(path, slots, after=after, domain=path[0].domain)
        self.forsake(slots)
        return blocks

    def store(self, block: int, parent: CachedBlock | None, token_ids: bytes, *, domain: str) -> CachedBlock | None:
        """Cache `block`, which only the caller holds and has filled with `token_ids` behind `parent`.

        If the device already caches an equal block, the caller's hold moves to that block and `block` becomes free.
        None (and nothing changed) if other tokens have the key, or `parent` is no longer cached.
        """
        assert self._holders[block] == 1, "a shared block cannot be stored by one of its holders"
        known = self.prefix.find(parent, token_ids, domain=domain)
        if known is not None and known.block is not None:
            self.share(known)
            if self.windows is not None:
                self.windows.move(block, known.block)
            self.release([block])
            return known
        if known is not None:
            self._place(known, block)
            return known
        cached = self.prefix.add(block, parent, token_ids, domain=domain)
        if cached is not None:
            self._cached.enter(cached, block)
        return cached

    def release(self, blocks: Sequence[int], *, rank: int = 0) -> None:
        """End one hold on each of `blocks` (in their sequence's order): cached blocks become idle, the rest free.

        `rank` is the rank of the class that used them until now; 0 is the best.
        """
        now = self._taken / self.size - RANK_TURNS * rank
        for block in reversed(blocks):
            cached = self._cached.get(block)
            if cached is not None:
                worth = now + recompute_cost(cached.depth, self.options.doubling_tokens)
                cached.worth = max(cached.worth, worth)
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if cached is None:
                self._vacate(block)
            elif cached not in self.pins:
                self._idle.add(cached, is_leaf=not cached.device_children)

    def park(self, path: Sequence[CachedBlock], blocks: Sequence[int], *, rank: int) -> list[int] | None:
        """Host slots, held, that replace `blocks` (the first of them cached, as `path`), which are released.

        None, and nothing changed, if the host tier has no room.
        """
        known = [cached.slot for cached in path if cached.slot is not None]
        for slot in known:
            self.host.hold(slot)
        if self.host.room < len(blocks) - len(known):
            self.forsake(known)
            return None
        slots = [self._park_cached(cached) for cached in path]
        slots += [self._save(block) for block in blocks[len(path) :]]
        self.host.flights.start()
        self.release(blocks, rank=rank)
        return slots

    def unpark_need(self, path: Sequence[CachedBlock], slots: Sequence[int]) -> int:
        """By how much `unpark` would lower the available blocks: fresh blocks, and idle ones that it shares."""
        on_device = sum(cached.block is not None for cached in path)
        return len(slots) - on_device + sum(cached in self._idle for cached in path)

    def unpark(self, path: Sequence[CachedBlock], slots: Sequence[int], *, domain: str) -> list[int]:
        """Device blocks, held, that replace `slots`, which are released; copies are under way.

        Blocks of `path` that are still on the device are shared instead. Raises OutOfBlocks; nothing has changed then.
        """
        need, room = self.unpark_need(path, slots), self.available_for(domain)
        if need > room:
            raise OutOfBlocks(f"{need} blocks are wanted and {room} of {self.size} are free or evictable")
        blocks = [self.share(cached) for cached in path if cached.block is not None]
        rest, after = len(blocks), blocks[-1] if blocks else None
        blocks += self._load(path[rest:], slots[rest:], after=after, domain=domain)
        self.forsake(slots)
        return blocks

    def forsake(self, slots: Sequence[int]) -> None:
        """End one hold on each of `slots`, which `park` returned."""
        for slot in reversed(slots):
            self.host.release(slot)

    def distrust(self, path: Sequence[CachedBlock]) -> None:
        """Uncache the end of `path`, which the caller holds, up to the last block with another holder or a child."""
        for cached in reversed(path):
            block = cached.block
            assert block is not None, "a block that the caller holds must be on the device"
            if self._holders[block] > 1 or cached.children or self.host.is_held(cached.slot):
                break
            self.pins.discard(cached)
            self.disk.forget(cached.key)
            if cached.slot is not None:
                self.host.discard(cached)
            self._cached.leave(cached, block)
            self.prefix.displace(cached)

    def clear(self, domain: str | None = None) -> int:
        """Forget all cached blocks, or those of `domain`, all adapters included; returns their number over all tiers.

        Held blocks and slots stay with their holders, uncached.
        """
        on_disk = self.disk.clear(domain)
        self.peers.clear(domain)
        gone = self._clear(None if domain is None else lambda found: tenant_domain(found) == domain)
        return len(on_disk.union(gone))

    def clear_adapter(self, digest: str) -> None:
        """Forget the cached blocks of the adapter with weights of this `digest`, in all domains."""
        for key in self._clear(lambda domain: adapter_digest(domain) == digest):
            self.disk.forget(key)

    def _clear(self, covers: Callable[[str], bool] | None) -> list[int]:
        """Forget the cached blocks in memory in the domains that `covers` names, or all; returns their keys."""
        gone = [cached for cached in self.prefix if covers is None or covers(cached.domain)]
        for cached in reversed(gone):
            self.pins.discard(cached)
            self._idle.remove(cached)
            self.host.forget(cached)
            if cached.block is not None:
                self._cached.leave(cached, cached.block)
                if cached.block not in self._holders:
                    self._vacate(cached.block)
        self.prefix.clear(covers)
        return [cached.key for cached in gone]

    def settle_tiers(self) -> None:
        """Take over what came from disk and from other shards since the last call, or was written, and lend."""
        if self.disk.is_open or self.lending.is_open:
            self._settle(self.host.flights.land())
            self.disk.settle(self._taken / self.size)
            self.peers.settle(self._taken / self.size)
            self.lending.settle()
            self.host.flights.start()

    @property
    def is_moving(self) -> bool:
        """Whether blocks are being read, written, fetched or lent."""
        return self.disk.is_busy or self.peers.is_busy or self.lending.is_busy

    def preserve(self, *, until_s: float) -> int:
        """Write all cached blocks to disk, until `until_s` of the directory's clock; returns the number on disk then.

        Pinned blocks go first, then those of most worth, each behind its parents. This waits for the disk, and nothing
        may be taken, restored or parked afterwards.
        """
        self._finish_copies()
        worth = self._worth_of_all()
        for last in sorted(worth, key=worth.__getitem__, reverse=True):
            path: list[CachedBlock] = []
            cached: CachedBlock | None = last
            while cached is not None and self.disk.lacks(cached):
                path.append(cached)
                cached = cached.parent
            for block in reversed(path):
                self.disk.preserve(block, worth=worth[block], until_s=until_s)
                self._finish_copies()
        self.disk.finish(until_s)
        return self.disk.blocks

    def batches(self) -> list[Batch]:
        """All cached blocks, as they are offered to other shards before this one stops."""
        return batches_of(self._worth_of_all(), self._taken / self.size)

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Assert that no block is lost or in two places in either tier, that parents are cached and pins are kept.

        With `holders` (the blocks of each holder), also that exactly these blocks are held.
        """
        for part in (self._free, self._idle, self.pins, self._cached, self.prefix, self.host, self.disk):
            part.check()
        self.peers.check()
        self.lending.check()
        if self.windows is not None:
            self.windows.check()
        kept = {block for block, cached in self._cached.items() if cached in self.pins} - self._holders.keys()
        idle = [cached.block for cached in self._idle if cached.block is not None]
        places = [*self._free.ids(), *self._draining, *idle, *kept, *self._holders]
        assert sorted(places) == list(range(self.size)), "a block is lost or in two places"
        assert all(self.host.flights.is_busy(block) for block in self._draining), "a free block was not given back"
        assert not any(map(self.host.flights.is_busy, self._free.ids())), "a free block is still copied"
        assert {cached.block: cached for cached in self.prefix if cached.block is not None} == self._cached, (
            "pool and prefix cache disagree"
        )
        for cached in self._idle:
            assert cached not in self.pins, "a pinned block could be evicted"
            assert self._idle.is_ripe(cached) == (not cached.device_children), (
                "a parent could be evicted before its child"
            )
        for cached in self._parents_of_held():
            assert cached in self.prefix, "the parent of a held block was evicted"
        assert all(count > 0 for count in self._holders.values()), "an owned block has no holder"
        if holders is not None:
            held = Counter(block for blocks in holders for block in blocks)
            assert held == Counter(self._holders), "holders are miscounted"

    def _parents_of_held(self) -> Iterator[CachedBlock]:
        for block in self._holders.keys() & self._cached.keys():
            parent = self._cached[block].parent
            if parent is not None:
                assert self.is_held(parent.block), "a held block has an idle parent"
                yield parent

    def _settle(self, quiet: Iterable[int]) -> None:
        for block in quiet:
            if block in self._draining:
                self._draining.remove(block)
                self._free.give(block)

    def _worth_of_all(self) -> dict[CachedBlock, float]:
        """The worth of each cached block beyond this shard's life."""
        return {cached: self._worth_of(cached) + PINNED_TURNS * (cached in self.pins) for cached in self.prefix}

    def _worth_of(self, cached: CachedBlock) -> float:
        """Its worth; a block that is held is used now, and may never have been released."""
        now = self._taken / self.size
        return max(cached.worth, now) if self.is_held(cached.block) else cached.worth

    def _finish_copies(self) -> None:
        self.host.flights.start()
        while self.host.flights.is_copying:
            self._settle(self.host.flights.wait())
        self.disk.begin()

    def _is_pinned(self, block: int) -> bool:
        cached = self._cached.get(block)
        return cached is not None and cached in self.pins

    def _vacate(self, block: int) -> None:
        if self.windows is not None:
            self.windows.forget(block)
        if self.host.flights.is_busy(block):
            self._draining.add(block)
        else:
            self._free.give(block)

    def _load(self, path: Sequence[CachedBlock], slots: Sequence[int], *, after: int | None, domain: str) -> list[int]:
        """Fresh blocks to which `slots` are copied; the first of them are those of `path`."""
        blocks = self.take(len(slots), after=after, domain=domain)
        for slot, block in zip(slots, blocks, strict=True):
            self.host.flights.load(slot, block)
        for cached, block in zip(path, blocks, strict=False):
            self._place(cached, block)
        self.host.flights.start()
        return blocks

    def _place(self, cached: CachedBlock, block: int) -> None:
        """Record that `cached`, until now in the host tier only, is also in `block`."""
        self.prefix.place(cached, block)
        self._cached.enter(cached, block)
        self.host.settle(cached)

    def _save(self, block: int) -> int:
        """A slot, held, to which `block` is copied."""
        slot = self.host.take()
        assert slot is not None, "the caller must check for room before saving"
        self.host.flights.save(block, slot)
        return slot

    def _park_cached(self, cached: CachedBlock) -> int:
        """The slot of `cached`; the caller holds it if it existed before."""
        if cached.slot is not None:
            return cached.slot
        assert cached.block is not None, "a cached block is nowhere"
        slot = self._save(cached.block)
        self.host.enter(cached, slot)
        return slot

    def _may_evict(self, group: str | None, domain: str | None) -> bool:
        """Whether a block of `group` may be evicted on behalf of `domain`."""
        return group is None or group == domain or self._cached.of_domain[group] > self.options.floors[group]

    def _evict(self, domain: str | None) -> bool:
        """Evict the block of least worth, and those before it with consecutive ids; False if there is none."""
        cached = self._idle.least([group for group in (None, *self.options.floors) if self._may_evict(group, domain)])
        if cached is None:
            return False
        group = cached.domain if cached.domain in self.options.floors else None
        for _ in range(self._run_blocks):
            block, parent, worth = cached.block, cached.parent, cached.worth
            assert block is not None, "an idle block of the pool must be on the device"
            self._move_out(cached, block)
            if parent is None or parent.block != block - 1 or not self._idle.is_ripe(parent):
                break
            if parent.worth > worth or not self._may_evict(group, domain):
                break
            cached = parent
        return True

    def _move_out(self, cached: CachedBlock, block: int) -> None:
        """Move `cached` off the device: to the host tier if it is worth it, or if its children are there."""
        assert block not in self._holders, "a held block is never evicted"
        assert cached not in self.pins, "a pinned block is never evicted"
        self._idle.remove(cached)
        self._cached.leave(cached, block)
        slot = None
        if cached.slot is None:
            # a block with children in the host tier replaces the block of least worth: its children must keep a parent
            slot = self.host.take() if cached.children else self.host.take(cached.worth)
        if slot is not None:
            self.host.flights.save(block, slot)
            self.host.enter(cached, slot)
        self.disk.save(cached, block)
        self.prefix.displace(cached)
        if slot is not None:
            self.host.release(slot)
        else:
            self.host.settle(cached)
        self._vacate(block)
        parent = cached.parent
        if parent is not None and not parent.device_children and parent in self._idle:
            self._idle.ripen(parent)

    def _settle_pinned(self, cached: CachedBlock) -> None:
        """Classify `cached` again after its pin began or ended."""
        if cached in self.pins:
            self._idle.remove(cached)
        elif cached.block is not None and cached.block not in self._holders:
            self._idle.add(cached, is_leaf=not cached.device_children)
        self.host.settle(cached)
