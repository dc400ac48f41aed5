"""PrefixIndex: the router's map from block key to the backends believed to hold it. A hint, never a promise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from policies.prefix.holders import NO_HOLDERS, HolderSets
from policies.prefix.match import Match
from policies.prefix.members import TIERS, Members, level_of
from policies.prefix.search import Falls, Masks, search, walk
from policies.prefix.table import MOST_STAMP, MOST_VALUE, VALUE_BITS, Keys, KeyTable, Values, as_keys

TIER_WEIGHTS: Mapping[str, float] = MappingProxyType({"device": 1.0, "host": 0.75, "disk": 0.25})
"""Value of a block in each tier relative to one on the device: restoring it costs a part of computing it."""

_SETS_SHARE = 4
"""One quarter of the bytes may be used for sets of holders."""

_VECTOR_FROM = 256
"""Number of keys from which numpy is faster than a loop: it costs 0.1 to 0.3 ms a call (busy 2.5 GHz core, 2026-11)."""

_STALE_SHARE = 8
"""Segments are cleaned one by one if 1/8 of the rows are stale."""

_ALL_TIERS = (1 << len(TIERS)) - 1

_STRIDE = 512
"""Blocks that are looked up at once for backends with holes."""


class PrefixIndex:
    """Knows which backends hold which blocks, and how much of a prompt's beginning each of them holds.

    One row of a `KeyTable` per block, however many backends hold it: its cell names one of the `HolderSets`. All
    stays within `max_bytes` (plus at most 1 kB per backend and tier). Blocks that were stored or touched
    longest ago are dropped first, and of one prompt the last.

    A backend's blocks are prefix-closed: with a block it holds the block's parent, in the same or a faster tier.
    Feeds of the index guarantee that, or call `expect_holes`. `longest` searches the depth of prefix-closed backends in
    a few probes and walks for the others. If the guarantee is broken, it may return a depth that lies behind a hole.
    """

    def __init__(self, *, max_bytes: int = 256 * 2**20, weights: Mapping[str, float] = TIER_WEIGHTS) -> None:
        self.max_bytes = max_bytes
        self._members = Members()
        self._sets = HolderSets(max_bytes // _SETS_SHARE, MOST_VALUE // 2)
        self._table = KeyTable(
            max_bytes - max_bytes // _SETS_SHARE,
            renewed=self._renewed_values,
            dropped=lambda values: self._sets.release(values.tolist()),
        )
        self._weights = tuple(weights[tier] for tier in TIERS)
        self._p_hit: dict[str, float] = {}
        self._holes: set[str] = set()
        self._clock = 0

    def __repr__(self) -> str:
        return (
            f"<PrefixIndex {len(self)} blocks of {len(self._members)} backends in {len(self._sets) - 1} sets; "
            f"{self.size_bytes()} of {self.max_bytes} bytes>"
        )

    def __len__(self) -> int:
        """Number of held blocks. Counts the sets, so do not call it for every request."""
        return self._sets.blocks_of(self._members.live)

    def size_bytes(self) -> int:
        """Approximate memory of blocks and sets."""
        return self._table.size_bytes() + self._sets.size_bytes()

    def store(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        """Record that `backend` holds the blocks `keys`, parents before children."""
        bit = self._members.bit(backend, level_of(tier))
        live = self._members.live

        def stored(mask: int) -> int:
            held = self._sets.number(mask & live | bit)
            # too many different sets: only the newest holder of this block is kept
            return self._sets.number(bit) or NO_HOLDERS if held is None else held

        self._tick(len(keys))
        self._change(keys, stored, is_new=True)

    def evict(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        """Record that `backend` no longer holds these blocks in this tier."""
        if backend not in self._members:
            return
        others = self._members.live & ~self._members.bit(backend, level_of(tier))
        self._change(keys, lambda mask: self._sets.number(mask & others) or NO_HOLDERS, is_new=False)

    def touch(self, keys: Sequence[int]) -> None:
        """Mark these blocks as in use, so that they are dropped last. Unknown blocks stay unknown."""
        if not keys:
            return
        self._tick(len(keys))
        if len(keys) < _VECTOR_FROM:
            cells = self._table.cells
            for stamp, key in zip(range(self._clock, 0, -1), keys, strict=False):
                if (place := self._table.find(key or 1)) is not None:
                    cells[place] = stamp << VALUE_BITS | cells[place] & MOST_VALUE
        else:
            places = self._table.find_many(as_keys(keys))
            known = np.flatnonzero(places >= 0)
            self._table.write(places[known], self._table.values_at(places[known]), self._stamps(known))

    def clear(self, backend: str) -> None:
        """`backend` holds nothing."""
        self.forget(backend)
        self._members.bit(backend, 0)

    def forget(self, backend: str) -> None:
        """Remove `backend`."""
        self._sets.retire(self._members.leave(backend))
        self._p_hit.pop(backend, None)
        self._holes.discard(backend)
        self._tidy()

    def trust(self, backend: str, p_hit: float) -> None:
        """Set the probability that the known blocks of `backend` are there, until it is set anew or it is cleared."""
        if not 0.0 <= p_hit <= 1.0:
            raise ValueError(f"{p_hit} is not a probability")
        if p_hit < 1.0:
            self._p_hit[backend] = p_hit
        else:
            self._p_hit.pop(backend, None)

    def expect_holes(self, backend: str) -> None:
        """Walk the depth of `backend` until it is cleared, because it evicts blocks before their children."""
        self._holes.add(backend)

    def longest(self, keys: Sequence[int]) -> Mapping[str, Match]:
        """Backend -> how much of the prompt with blocks `keys` it holds; without those that hold nothing."""
        if not keys or not self._members.live:
            return {}
        members, masks, holes = self._members, self._reached(), 0
        for name in self._holes:
            holes |= members.bits(name)
        wanted = members.live if members.has_slower else members.firsts
        falls = search(self._sets_of(keys), masks, self._sets.counts, count=len(keys), wanted=wanted & ~holes)
        if holes:
            falls += walk(self._changes(keys, masks), wanted & holes, len(keys))
        return self._matches(falls)

    def holders(self, but: Collection[str] = ()) -> tuple[Callable[[int], int], int]:
        """A lookup of the holders of a block, as bits, by its key, and the bits of all backends that are not in `but`.

        Bits beyond those mean nothing. A backend has one bit, whatever the tiers are. Valid until the next change.
        """
        members, masks, seek, cells = self._members, self._reached(), self._table.seek, self._table.cells
        bits, slowest = members.firsts, len(TIERS) - 1 if members.has_slower else 0
        for name in but:
            bits &= ~members.bits(name)
        return lambda key: masks[cells[seek(key or 1)] & MOST_VALUE], bits << slowest

    def check(self) -> None:
        """Assert that table, sets and members agree, and that the bound holds."""
        self._table.check()
        self._sets.check()
        self._members.check()
        assert self.size_bytes() <= self.max_bytes + self._slack_bytes(), f"{self!r}: over its bound"

    def _slack_bytes(self) -> int:
        """Memory beyond the bound: sets of a single backend are always kept."""
        return len(TIERS) * (len(self._members) + 1) * 1024

    def _change(self, keys: Sequence[int], changed: Callable[[int], int], *, is_new: bool) -> None:
        """Give each block the set that `changed` returns for its mask; unknown blocks are added if `is_new`."""
        change = _Change(self._sets, changed, len(keys))
        if len(keys) < _VECTOR_FROM:
            self._change_each(keys, change, is_new=is_new)
        else:
            self._change_many(as_keys(keys), change, is_new=is_new)
        change.settle()
        self._tidy()

    def _change_each(self, keys: Sequence[int], change: _Change, *, is_new: bool) -> None:
        place_of, cells = self._table.claim if is_new else self._table.find, self._table.cells
        news, blocks, stamp = change.news, change.blocks, self._clock
        for key in keys:
            place = place_of(key or 1)
            if place is None:
                continue
            content = cells[place]
            old = content & MOST_VALUE
            new = news.get(old)
            if new is None:
                new = change.renamed(old)
            blocks[old] += 1
            if is_new:
                cells[place] = stamp << VALUE_BITS | new
                stamp -= 1
            else:
                cells[place] = content - old + new

    def _change_many(self, keys: Keys, change: _Change, *, is_new: bool) -> None:
        places = self._table.find_many(keys)
        known = np.flatnonzero(places >= 0)
        self._change_at(places[known], change, self._stamps(known) if is_new else None)
        if is_new:
            missing, batch = np.flatnonzero(places < 0), self._table.batch
            for start in range(0, len(missing), batch):
                some = missing[start : start + batch]
                self._change_at(self._table.claim_many(keys[some]), change, self._stamps(some))

    def _change_at(self, places: Values, change: _Change, stamps: Keys | None) -> None:
        places, firsts = np.unique(places, return_index=True)
        olds, inverse, counts = np.unique(self._table.values_at(places), return_inverse=True, return_counts=True)
        news = np.array([change.renamed(old) for old in olds.tolist()], np.int64)
        self._table.write(places, news[inverse], None if stamps is None else stamps[firsts])
        for old, blocks in zip(olds.tolist(), counts.tolist(), strict=True):
            change.blocks[old] += blocks

    def _tick(self, blocks: int) -> None:
        """Advance time by so many blocks. After some 4e12 of them it starts again, and older blocks seem newer."""
        self._clock += blocks
        if self._clock > MOST_STAMP:
            self._clock = blocks

    def _stamps(self, places: Values) -> Keys:
        """Stamps for the blocks at `places` of a prompt: no parent is older than the blocks that need it."""
        return (self._clock - places).astype(np.uint64)

    def _tidy(self) -> None:
        clean = self._sets.sweep()
        if clean:
            self._members.clean(clean)
        if self._sets.stale_blocks * _STALE_SHARE > len(self._table):
            self._table.refresh()

    def _renewed_values(self, values: Values) -> Values:
        numbers, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        renewed = [self._sets.renewed(number) for number in numbers.tolist()]
        for old, new, blocks in zip(numbers.tolist(), renewed, counts.tolist(), strict=True):
            if old != new:
                self._sets.move(old, new, blocks)
        return np.array(renewed, np.int64)[inverse]

    def _reached(self) -> Masks:
        """Holders by set number, each tier together with all faster ones; includes bits of removed backends."""
        return _Reached(self._sets.masks, self._members.reach) if self._members.has_slower else self._sets.masks

    def _sets_of(self, keys: Sequence[int]) -> Callable[[int], int]:
        """The number of the set of the block at a depth."""
        seek, cells = self._table.seek, self._table.cells
        return lambda depth: cells[seek(keys[depth] or 1)] & MOST_VALUE

    def _changes(self, keys: Sequence[int], masks: Masks) -> Iterator[tuple[int, int]]:
        """(depth, holders of the block there) wherever they differ from the depth before."""
        for start in range(0, len(keys), _STRIDE):
            places = self._table.find_many(as_keys(keys[start : start + _STRIDE]))
            numbers = np.where(places < 0, NO_HOLDERS, self._table.values_at(places))
            for depth in [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]:
                yield start + depth, masks[int(numbers[depth])]

    def _matches(self, falls: Falls) -> dict[str, Match]:
        """Converts the depths of bits to backends' Matches; backends with equal depths share one Match."""
        members = self._members
        matches: dict[str, Match] = {}
        names, firsts, has_slower, weight = members.names, members.firsts, members.has_slower, self._weights[0]
        levels: list[dict[str, int]] = [{} for _ in TIERS]
        for depth, bits in falls:
            # nearly all backends: all their tiers end here
            whole = bits & bits >> 1 & bits >> 2 & firsts if has_slower else bits
            if whole and depth:
                match = Match(depth, depth, depth * weight)
                for name in names(whole):
                    matches[name] = match
            if has_slower and (apart := bits & ~(whole * _ALL_TIERS)):
                for level, depth_of in enumerate(levels):
                    depth_of.update(dict.fromkeys(names(apart >> level & firsts), depth))
        device, host, disk = levels
        for name, depth in disk.items():
            if depth:
                matches[name] = self._match(device.get(name, 0), host.get(name, 0), depth)
        for name in self._p_hit.keys() & matches.keys():
            matches[name] = matches[name]._replace(p_hit=self._p_hit[name])
        return matches

    def _match(self, device: int, host: int, disk: int) -> Match:
        """From the number of blocks held on the device, on device or host, and in any tier."""
        weights = self._weights
        return Match(disk, device, device * weights[0] + (host - device) * weights[1] + (disk - host) * weights[2])


class _Reached(dict[int, int]):
    """Masks by number as `reach` makes them, computed at first use."""

    def __init__(self, masks: Sequence[int], reach: Callable[[int], int]) -> None:
        super().__init__()
        self._masks, self._reach = masks, reach

    def __missing__(self, number: int) -> int:
        mask = self[number] = self._reach(self._masks[number])
        return mask


class _Change:
    """The replacement of sets in one change of at most `most` blocks, and the numbers of changed blocks.

    Blocks may be dropped during the change, and with the last of them their set, and its number could be reused:
    so old and new sets are held until `settle`.
    """

    def __init__(self, sets: HolderSets, changed: Callable[[int], int], most: int) -> None:
        self.news: dict[int, int] = {}
        self.blocks: dict[int, int] = {}
        self._sets, self._changed, self._most = sets, changed, most

    def renamed(self, old: int) -> int:
        """The new set for blocks of set `old`."""
        new = self.news.get(old)
        if new is None:
            new = self.news[old] = self._changed(self._sets.masks[old])
            self.blocks[old] = 0
            self._sets.move(NO_HOLDERS, old)
            # as many as may be dropped before they are counted
            self._sets.move(NO_HOLDERS, new, self._most + 1)
        return new

    def settle(self) -> None:
        """Count the changed blocks, and release the sets."""
        for old, new in self.news.items():
            if old != new:
                self._sets.move(old, new, self.blocks[old])
            self._sets.move(old, NO_HOLDERS)
            self._sets.move(new, NO_HOLDERS, self._most + 1)
