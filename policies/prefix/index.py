"""PrefixIndex: the router's map from block key to the backends believed to hold it. A hint, never a promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from policies.prefix.holders import NOBODY, HolderSets
from policies.prefix.match import Match
from policies.prefix.members import TIERS, Members, level_of
from policies.prefix.search import Falls, Masks, search, walk
from policies.prefix.table import MOST_STAMP, MOST_VALUE, VALUE_BITS, Keys, KeyTable, Values, as_keys

TIER_WEIGHTS: Mapping[str, float] = MappingProxyType({"device": 1.0, "host": 0.75, "disk": 0.25})
"""What a block in each tier saves against one on the device: copying it back costs a part of computing it."""

_SETS_SHARE = 4
"""Of the bytes, one quarter may go to sets of holders."""

_VECTOR_FROM = 256
"""Keys from which numpy is faster than a loop: it costs 0.1 to 0.3 ms a call (busy 2.5 GHz core, 2026-11)."""

_STALE_SHARE = 8
"""From 1/8 of stale rows on, segments are cleaned one by one."""

_ALL_TIERS = (1 << len(TIERS)) - 1

_STRIDE = 512
"""Blocks that are looked up at once for backends with holes."""


class PrefixIndex:
    """Knows which backends hold which blocks, and answers how much of a prompt's beginning each of them holds.

    One row of a `KeyTable` for each block, however many backends hold it: its cell names one of the `HolderSets`. All
    stays within `max_bytes` (and 1 kB for each backend and tier at most); the blocks that were stored or touched
    longest ago go first, of one prompt the last.

    What a backend holds is prefix-closed: with a block it holds the block's parent, in the same or a faster tier.
    Whoever feeds the index vouches for that, or says `expect_holes`. `longest` searches the depth of the closed ones in
    a few looks and walks for the others. Where the promise is broken, it may name a depth that lies behind a hole.
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
        """Blocks that somebody holds. Counts the sets, so not for every request."""
        return self._sets.blocks_of(self._members.live)

    def size_bytes(self) -> int:
        """About how much memory blocks and sets take."""
        return self._table.size_bytes() + self._sets.size_bytes()

    def store(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        """`backend` now holds the blocks `keys`, parents before children."""
        bit = self._members.bit(backend, level_of(tier))
        live = self._members.live

        def stored(mask: int) -> int:
            held = self._sets.number(mask & live | bit)
            # too many different sets: of this block only the newest holder is remembered
            return self._sets.number(bit) or NOBODY if held is None else held

        self._tick(len(keys))
        self._change(keys, stored, is_new=True)

    def evict(self, backend: str, keys: Sequence[int], tier: str = "device") -> None:
        """`backend` holds these no longer in this tier."""
        if backend not in self._members:
            return
        others = self._members.live & ~self._members.bit(backend, level_of(tier))
        self._change(keys, lambda mask: self._sets.number(mask & others) or NOBODY, is_new=False)

    def touch(self, keys: Sequence[int]) -> None:
        """These blocks are in use: they are the last to go. Unknown ones stay unknown."""
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
        """`backend` is no longer there."""
        self._sets.retire(self._members.leave(backend))
        self._p_hit.pop(backend, None)
        self._holes.discard(backend)
        self._tidy()

    def trust(self, backend: str, p_hit: float) -> None:
        """What is known of `backend` is true with this probability, until it is said anew or the backend is cleared."""
        if not 0.0 <= p_hit <= 1.0:
            raise ValueError(f"{p_hit} is not a probability")
        if p_hit < 1.0:
            self._p_hit[backend] = p_hit
        else:
            self._p_hit.pop(backend, None)

    def expect_holes(self, backend: str) -> None:
        """`backend` evicts blocks before their children, so that its depth must be walked, until it is cleared."""
        self._holes.add(backend)

    def longest(self, keys: Sequence[int]) -> Mapping[str, Match]:
        """Backend -> how much of the prompt with blocks `keys` it holds; those that hold nothing are left out."""
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

    def check(self) -> None:
        """Prove that table, sets and members agree, and that the bound holds."""
        self._table.check()
        self._sets.check()
        self._members.check()
        assert self.size_bytes() <= self.max_bytes + self._slack_bytes(), f"{self!r}: over its bound"

    def _slack_bytes(self) -> int:
        """Sets of one backend alone are always kept."""
        return len(TIERS) * (len(self._members) + 1) * 1024

    def _change(self, keys: Sequence[int], changed: Callable[[int], int], *, is_new: bool) -> None:
        """Give each block the set that `changed` makes of its mask; unknown blocks are added if they are new."""
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
        """Time goes on by so many blocks; after some 4e12 of them it starts again, and what is older seems newer."""
        self._clock += blocks
        if self._clock > MOST_STAMP:
            self._clock = blocks

    def _stamps(self, places: Values) -> Keys:
        """Stamps for the blocks at `places` of a prompt: no parent is older than what it makes reachable."""
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
        """Who holds blocks of a set, each tier with all faster ones; with bits of who is gone."""
        return _Reached(self._sets.masks, self._members.reach) if self._members.has_slower else self._sets.masks

    def _sets_of(self, keys: Sequence[int]) -> Callable[[int], int]:
        """The number of the set of the block at a depth."""
        seek, cells = self._table.seek, self._table.cells
        return lambda depth: cells[seek(keys[depth] or 1)] & MOST_VALUE

    def _changes(self, keys: Sequence[int], masks: Masks) -> Iterator[tuple[int, int]]:
        """(depth, who holds the block there) wherever that differs from the depth before."""
        for start in range(0, len(keys), _STRIDE):
            places = self._table.find_many(as_keys(keys[start : start + _STRIDE]))
            numbers = np.where(places < 0, NOBODY, self._table.values_at(places))
            for depth in [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]:
                yield start + depth, masks[int(numbers[depth])]

    def _matches(self, falls: Falls) -> dict[str, Match]:
        """What the depths of bits say of backends; those with equal depths share one Match."""
        members, matches = self._members, dict[str, Match]()
        names, firsts, has_slower, weight = members.names, members.firsts, members.has_slower, self._weights[0]
        levels: list[dict[str, int]] = [{} for _ in TIERS]
        for depth, bits in falls:
            # whose tiers all end here: nearly everybody's
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
        """Of blocks held on the device, there or on the host, and in any tier."""
        weights = self._weights
        return Match(disk, device, device * weights[0] + (host - device) * weights[1] + (disk - host) * weights[2])


class _Reached(dict[int, int]):
    """Masks by number as `reach` makes them, when they are first asked for."""

    def __init__(self, masks: Sequence[int], reach: Callable[[int], int]) -> None:
        super().__init__()
        self._masks, self._reach = masks, reach

    def __missing__(self, number: int) -> int:
        mask = self[number] = self._reach(self._masks[number])
        return mask


class _Change:
    """Which set takes the place of which in one change of `most` blocks at most, and how many blocks change so.

    Blocks may be dropped in the middle, and with the last of them their set, whose number would be given to another:
    old and new sets are held until `settle`.
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
            self._sets.move(NOBODY, old)
            # as many as may be dropped before they are counted
            self._sets.move(NOBODY, new, self._most + 1)
        return new

    def settle(self) -> None:
        """Count the blocks that changed, and let go of the sets."""
        for old, new in self.news.items():
            if old != new:
                self._sets.move(old, new, self.blocks[old])
            self._sets.move(old, NOBODY)
            self._sets.move(new, NOBODY, self._most + 1)
