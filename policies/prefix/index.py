"""PrefixIndex: the router's map from block key to the backends believed to hold it. A hint, never a promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from policies.prefix.holders import NOBODY, HolderSets
from policies.prefix.match import Match
from policies.prefix.members import TIERS, Members, level_of
from policies.prefix.search import Falls, search, walk
from policies.prefix.table import MOST_STAMP, MOST_VALUE, VALUE_BITS, Keys, KeyTable, Values, as_keys

TIER_WEIGHTS: Mapping[str, float] = MappingProxyType({"device": 1.0, "host": 0.75, "disk": 0.25})
"""What a block in each tier saves against one on the device: copying it back costs a part of computing it."""

_SETS_SHARE = 4
"""Of the bytes, one quarter may go to sets of holders."""

_VECTOR_FROM = 48
"""Keys from which numpy is faster than a loop."""

_STALE_SHARE = 8
"""From 1/8 of stale rows on, segments are cleaned one by one."""

_STRIDE = 512
"""Blocks that are looked up at once for backends with holes."""


class PrefixIndex:
    """Knows which backends hold which blocks, and answers how much of a prompt's beginning each of them holds.

    One row of a `KeyTable` for each block, however many backends hold it: its cell names one of the `HolderSets`. All
    stays within `max_bytes`; the blocks that were stored or touched longest ago go first, of one prompt the last.

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
        self._p_hit[backend] = p_hit

    def expect_holes(self, backend: str) -> None:
        """`backend` evicts blocks before their children, so that its depth must be walked, until it is cleared."""
        self._holes.add(backend)

    def longest(self, keys: Sequence[int]) -> Mapping[str, Match]:
        """Backend -> how much of the prompt with blocks `keys` it holds; those that hold nothing are left out."""
        if not keys or not self._members.live:
            return {}
        holes = 0
        for name in self._holes:
            holes |= self._members.bits(name)
        falls = search(self._looker(keys, ~holes), len(keys))
        if holes:
            falls += walk(self._changes(keys, holes), holes, len(keys))
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
        news: dict[int, int] = {}
        try:
            if len(keys) < _VECTOR_FROM:
                self._change_each(keys, changed, news, is_new=is_new)
            else:
                self._change_many(as_keys(keys), changed, news, is_new=is_new)
        finally:
            for old, new in news.items():
                self._sets.move(old, NOBODY)
                self._sets.move(new, NOBODY)
        self._tidy()

    def _change_each(
        self, keys: Sequence[int], changed: Callable[[int], int], news: dict[int, int], *, is_new: bool
    ) -> None:
        place_of = self._table.claim if is_new else self._table.find
        cells, move, stamp = self._table.cells, self._sets.move, self._clock
        for key in keys:
            place = place_of(key or 1)
            if place is None:
                continue
            content = cells[place]
            old = content & MOST_VALUE
            new = news.get(old)
            if new is None:
                new = self._renamed(old, changed, news)
            if is_new:
                cells[place] = stamp << VALUE_BITS | new
                stamp -= 1
            else:
                cells[place] = content - old + new
            if new != old:
                move(old, new)

    def _change_many(self, keys: Keys, changed: Callable[[int], int], news: dict[int, int], *, is_new: bool) -> None:
        places = self._table.find_many(keys)
        known = np.flatnonzero(places >= 0)
        self._change_at(places[known], changed, news, stamps=self._stamps(known) if is_new else None)
        if is_new:
            missing, batch = np.flatnonzero(places < 0), self._table.batch
            for start in range(0, len(missing), batch):
                some = missing[start : start + batch]
                self._change_at(self._table.claim_many(keys[some]), changed, news, stamps=self._stamps(some))

    def _change_at(
        self, places: Values, changed: Callable[[int], int], news: dict[int, int], *, stamps: Keys | None
    ) -> None:
        places, firsts = np.unique(places, return_index=True)
        olds, inverse, counts = np.unique(self._table.values_at(places), return_inverse=True, return_counts=True)
        renamed = [news[old] if old in news else self._renamed(old, changed, news) for old in olds.tolist()]
        self._table.write(places, np.array(renamed, np.int64)[inverse], None if stamps is None else stamps[firsts])
        for old, new, blocks in zip(olds.tolist(), renamed, counts.tolist(), strict=True):
            if new != old:
                self._sets.move(old, new, blocks)

    def _renamed(self, old: int, changed: Callable[[int], int], news: dict[int, int]) -> int:
        """The new set for blocks of set `old`. Both stay until the change is over, however many blocks go meanwhile."""
        new = news[old] = changed(self._sets.masks[old])
        for number in (old, new):
            self._sets.move(NOBODY, number)
        return new

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

    def _looker(self, keys: Sequence[int], wanted: int) -> Callable[[int], int]:
        """Who of `wanted` holds the block at a depth, each tier with all faster ones."""
        find, cells, masks, reach = self._table.find, self._table.cells, self._sets.masks, self._members.reach
        reached: dict[int, int] = {}

        def mask_at(depth: int) -> int:
            place = find(keys[depth] or 1)
            if place is None:
                return 0
            number = cells[place] & MOST_VALUE
            mask = reached.get(number)
            if mask is None:
                mask = reached[number] = reach(masks[number] & wanted)
            return mask

        return mask_at

    def _changes(self, keys: Sequence[int], wanted: int) -> Iterator[tuple[int, int]]:
        """(depth, who of `wanted` holds the block there) wherever that differs from the depth before."""
        masks, reach = self._sets.masks, self._members.reach
        for start in range(0, len(keys), _STRIDE):
            places = self._table.find_many(as_keys(keys[start : start + _STRIDE]))
            numbers = np.where(places < 0, NOBODY, self._table.values_at(places))
            for depth in [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]:
                yield start + depth, reach(masks[int(numbers[depth])] & wanted)

    def _matches(self, falls: Falls) -> dict[str, Match]:
        """What the depths of bits say of backends, those with the same depths together."""
        firsts, names = self._members.firsts, self._members.names
        ends: list[dict[int, int]] = [{}, {}, {}]
        for depth, bits in falls:
            for level, depths in enumerate(ends):
                if depth and (alike := bits >> level & firsts):
                    depths[depth] = depths.get(depth, 0) | alike
        matches: dict[str, Match] = {}
        for total, members in ends[2].items():
            for middle, some in _meeting(members, ends[1]):
                for device, few in _meeting(some, ends[0]):
                    matches.update(dict.fromkeys(names(few), self._match(device, middle, total)))
        for name in self._p_hit.keys() & matches.keys():
            matches[name] = matches[name]._replace(p_hit=self._p_hit[name])
        return matches

    def _match(self, *depths: int) -> Match:
        steps = (depths[0], *(deep - shallow for shallow, deep in pairwise(depths)))
        credit = sum(weight * blocks for weight, blocks in zip(self._weights, steps, strict=True))
        return Match(depths[-1], depths[0], credit)


def _meeting(members: int, depths: dict[int, int]) -> Iterator[tuple[int, int]]:
    """(depth, members) for each depth at which some of `members` end; depth 0 for those that end at none."""
    for depth, ending in depths.items():
        if both := members & ending:
            yield depth, both
            members ^= both
    if members:
        yield 0, members
