"""The ownership of the host memory's slots. Torch-free."""

from __future__ import annotations

import math

from shards.kv.copier import Copier
from shards.kv.extents import FreeBlocks
from shards.kv.flights import Flights
from shards.kv.idle import IdleBlocks
from shards.kv.pins import Pins
from shards.kv.prefix import CachedBlock, PrefixCache


class HostTier:
    """Owns every slot of the host memory: for cached blocks that the device has no room for, and for parked sequences.

    A slot is free; held (by parked tables, or while it is being restored); double (its block is on the device too, so
    it is given up first, without loss); idle (the only copy, evictable, least worth first) or kept (the only copy,
    pinned). KV never changes once it is cached, so a restored block also stays here, and is evicted from the device
    a second time without a copy. Without a copier there are no slots.

    Only the copier touches a slot, and it copies in order, so a released slot can be taken again at once. The last
    `reserved` slots of the memory belong to the disk tier.
    """

    def __init__(self, prefix: PrefixCache, pins: Pins, copier: Copier | None = None, *, reserved: int = 0) -> None:
        self.size = 0 if copier is None else copier.slots - reserved
        self.flights = Flights(copier)
        self._prefix, self._pins = prefix, pins
        self._free = FreeBlocks(self.size)
        self._holders: dict[int, int] = {}
        self._cached: dict[int, CachedBlock] = {}
        self._doubles: dict[CachedBlock, None] = {}
        self._idle = IdleBlocks()

    def __repr__(self) -> str:
        return (
            f"HostTier({len(self._free)} free, {len(self._doubles)} double, {len(self._idle)} idle, "
            f"{len(self._holders)} held of {self.size})"
        )

    @property
    def room(self) -> int:
        """The number of slots that `take` could give: free or evictable."""
        return len(self._free) + len(self._doubles) + len(self._idle)

    @property
    def free(self) -> int:
        """The number of empty slots."""
        return len(self._free)

    def is_held(self, slot: int | None) -> bool:
        """Whether `slot` is held."""
        return slot in self._holders

    def take(self, worth: float = math.inf) -> int | None:
        """A slot for a new holder; evicts a block worth less than `worth` if needed. None if there is none."""
        if not len(self._free):
            victim = next(iter(self._doubles), None) or self._idle.least()
            if victim is None or (victim.block is None and victim.worth >= worth):
                return None
            self.discard(victim)
        slot = self._free.take(1)[0]
        self._holders[slot] = 1
        return slot

    def enter(self, cached: CachedBlock, slot: int) -> None:
        """Record that `cached` is in `slot`, which the caller holds."""
        self._prefix.keep(cached, slot)
        self._cached[slot] = cached

    def hold(self, slot: int) -> None:
        """Add a hold on `slot`; its block must be cached."""
        cached = self._cached[slot]
        self._doubles.pop(cached, None)
        self._idle.remove(cached)
        self._holders[slot] = self._holders.get(slot, 0) + 1

    def release(self, slot: int) -> None:
        """End one hold. After the last hold the slot stays if it is cached, and becomes free if not."""
        self._holders[slot] -= 1
        if self._holders[slot]:
            return
        del self._holders[slot]
        cached = self._cached.get(slot)
        if cached is None:
            self._free.give(slot)
        else:
            self.settle(cached)

    def settle(self, cached: CachedBlock) -> None:
        """Classify `cached` again after it reached or left the device, or after its pin began or ended."""
        if cached.slot is None or cached.slot in self._holders:
            return
        self._doubles.pop(cached, None)
        self._idle.remove(cached)
        if cached.block is not None:
            self._doubles[cached] = None
        elif cached not in self._pins:
            self._idle.add(cached, is_leaf=not cached.children)

    def discard(self, cached: CachedBlock) -> None:
        """Remove `cached` from this tier; its slot must not be held."""
        slot = cached.slot
        assert slot is not None, "only a block of the host tier can be discarded"
        del self._cached[slot]
        self._doubles.pop(cached, None)
        self._idle.remove(cached)
        self._prefix.drop(cached)
        self._free.give(slot)
        if cached.parent is not None and cached.parent in self._idle and not cached.parent.children:
            self._idle.ripen(cached.parent)

    def forget(self, cached: CachedBlock) -> None:
        """Prepare for `cached` to be removed from the cache. Its slot, if any, stays with its holders or is freed."""
        if cached.slot is None:
            return
        del self._cached[cached.slot]
        self._doubles.pop(cached, None)
        self._idle.remove(cached)
        if cached.slot not in self._holders:
            self._free.give(cached.slot)

    def check(self) -> None:
        """Assert that no slot is lost or in two places, and that host tier and prefix cache agree."""
        self._free.check()
        self._idle.check()
        self.flights.check()
        kept = {slot for slot, cached in self._cached.items() if cached.block is None and cached in self._pins}
        kept -= self._holders.keys()
        places = [*self._free.ids(), *self._holders, *kept]
        places += [cached.slot for cached in (*self._doubles, *self._idle) if cached.slot is not None]
        assert sorted(places) == list(range(self.size)), "a slot is lost or in two places"
        assert {cached.slot: cached for cached in self._prefix if cached.slot is not None} == self._cached, (
            "host tier and prefix cache disagree"
        )
        assert all(count > 0 for count in self._holders.values()), "a held slot has no holder"
        for cached in self._doubles:
            assert cached.block is not None, "a double is the only copy"
        for cached in self._idle:
            assert cached.block is None, "the only copy is a double"
            assert cached not in self._pins, "a pinned block could be evicted"
            assert self._idle.is_ripe(cached) == (not cached.children), "a parent could be evicted before its child"
