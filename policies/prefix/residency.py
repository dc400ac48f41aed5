"""Residency: the blocks that backends without cache events are believed to hold, from the prompts sent to them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from policies.prefix.cached_hints import Hint
from policies.prefix.capacity import CapacityModel
from policies.prefix.match import Match, faded
from policies.prefix.rungs import Rungs
from policies.prefix.table import MOST_STAMP, VALUE_BITS, Keys, KeyTable, as_keys

_RUNGS = Rungs(256, 16)
"""The recorded blocks: all of the first 16,384 tokens, then one of every 1,024."""

_SAMPLES = 8
"""Number of depths of a prompt at which the probability is evaluated."""

_LEAST_P = 0.05
"""Blocks below this probability are left out."""

_SURPRISING_P, _SURPRISES = 0.9, 2
"""Number of unexpected misses in a row after which the backend is assumed to have restarted."""

_SLACK_BLOCKS = 2
"""A server counts whole blocks of its own and always computes the last token: a difference up to this is no miss."""

_VECTOR_FROM = _RUNGS.each
"""Number of rungs from which numpy is faster than a loop; fewer are at the depths of their numbers."""

_CLOCK_FROM = 1 << 26
"""Clocks start late enough for the stamps of the longest prompt."""


@dataclass(frozen=True, slots=True)
class ResidencyRules:
    """`first_blocks` is the assumed capacity of a backend before any observation.

    `fresh_s` and `half_life_s`: how trust fades while nothing is sent there, because other clients may use it or its
    model may be unloaded. `max_bytes` for each backend.
    """

    first_blocks: int = 4096
    fresh_s: float = 300.0
    half_life_s: float = 900.0
    max_bytes: int = 2**20


@dataclass(frozen=True, slots=True)
class Guess:
    """The belief about a prompt when it was sent.

    `known` of its `blocks` had been sent before; `distances` are (depth, blocks computed since) of some of them.
    """

    backend: str
    blocks: int
    known: int
    distances: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """The recorded blocks that were sent to `backend`, or a part of them, for another router.

    `keys` are blocks, each with its age: how many blocks were computed there since it was used. `capacity_blocks` is
    the believed capacity, and nothing was sent there for `idle_s`.
    """

    backend: str
    keys: Keys
    ages: Keys
    capacity_blocks: float
    idle_s: float

    def __len__(self) -> int:
        return len(self.keys)

    def parts(self, most_keys: int) -> Iterator[Picture]:
        """The picture in pieces of at most `most_keys` keys each; at least one, which carries the capacity."""
        for start in range(0, max(1, len(self)), most_keys):
            part = slice(start, start + most_keys)
            yield replace(self, keys=self.keys[part], ages=self.ages[part])


@dataclass(slots=True)
class _Cache:
    """The rungs of the prompts that were sent to one backend. `clock` counts the blocks that it computed."""

    table: KeyTable
    capacity: CapacityModel
    clock: int = _CLOCK_FROM
    sent_at: float = 0.0
    surprises: int = 0

    def known(self, rungs: Sequence[int]) -> int:
        """How many of the first rungs were sent: keys are chained, so a known one implies all before it."""
        find = self.table.find
        if not rungs or find(rungs[0] or 1) is None:
            return 0
        low, high = 0, len(rungs)
        while high - low > 1:
            middle = (low + high) // 2
            if find(rungs[middle] or 1) is None:
                high = middle
            else:
                low = middle
        return high

    def holds(self, key: int, depth: int) -> bool:
        """Whether the block `key`, behind `depth` others, is there more likely than not. Deep ones are not recorded."""
        place = self.table.find(key or 1) if depth < _RUNGS.each else None
        return place is not None and self.clock - (self.table.cells[place] >> VALUE_BITS) <= self.capacity.blocks

    def distances(self, rungs: Sequence[int], known: int) -> tuple[tuple[int, int], ...]:
        """(depth, blocks computed since) of some of the first `known` rungs."""
        last = _RUNGS.blocks(known) - 1
        numbers = sorted({_RUNGS.within(at * last // _SAMPLES + 1) for at in range(_SAMPLES + 1)}) if known else []
        places = [(_RUNGS.blocks(number) - 1, self.table.find(rungs[number - 1] or 1)) for number in numbers]
        return tuple(
            (depth, self.clock - (self.table.cells[place] >> VALUE_BITS))
            for depth, place in places
            if place is not None
        )

    def note(self, rungs: Sequence[int], known: int, computed: int) -> None:
        """Record that the blocks of a prompt with `rungs`, the first `known` of which were sent before, are the newest;
        `computed` of them were not there before.
        """
        self.clock = min(self.clock + computed, MOST_STAMP)
        # of one prompt the last block is evicted first, as if it had been used before the others
        if len(rungs) < _VECTOR_FROM:
            for depth, key in enumerate(rungs):
                place = self.table.claim(key or 1)
                self.table.cells[place] = (self.clock - depth) << VALUE_BITS | 1
        else:
            depths = np.arange(len(rungs))
            depths[_RUNGS.each :] += (_RUNGS.every - 1) * (depths[_RUNGS.each :] - _RUNGS.each + 1)
            stamps = (self.clock - depths).astype(np.uint64)
            self.table.put_many(as_keys(rungs), np.ones(len(rungs), np.int64), stamps, known=known)

    def picture(self, backend: str, most_keys: int, now: float) -> Picture:
        """The `most_keys` newest blocks."""
        keys, _, stamps = self.table.used()
        ages = np.uint64(self.clock) - np.minimum(stamps, np.uint64(self.clock))
        if len(keys) > most_keys:
            newest = np.argpartition(ages, most_keys - 1)[:most_keys] if most_keys else np.arange(0)
            keys, ages = keys[newest], ages[newest]
        return Picture(backend, keys, ages, self.capacity.blocks, max(0.0, now - self.sent_at))

    def take_over(self, picture: Picture, now: float) -> None:
        """Take over the ages of blocks in `picture`, unless they are newer here."""
        keys, first = np.unique(np.maximum(picture.keys, np.uint64(1)), return_index=True)
        ages = picture.ages[first]
        kept = ages < _CLOCK_FROM
        keys, stamps = keys[kept], np.uint64(self.clock) - ages[kept]
        places = self.table.find_many(keys)
        known = places >= 0
        stamps[known] = np.maximum(stamps[known], self.table.stamps_at(places[known]))
        self.table.put_many(keys, np.ones(len(keys), np.int64), stamps)
        self.capacity = CapacityModel(picture.capacity_blocks)
        self.sent_at = max(self.sent_at, now - picture.idle_s)


class Residency:
    """Assumes that each backend keeps the blocks it was sent, as an LRU cache with a learned capacity.

    Call `sent` before a prompt is sent; it returns a Guess. Call `observe` with it and the answer's hint. A known
    length is rounded down to a recorded block; up to 16,384 tokens every block is recorded.
    """

    def __init__(self, rules: ResidencyRules = ResidencyRules()) -> None:
        self._rules = rules
        self._caches: dict[str, _Cache] = {}

    def __repr__(self) -> str:
        caches = (
            f"{name} {len(cache.table)} of {cache.capacity.blocks:.0f} blocks" for name, cache in self._caches.items()
        )
        return f"<Residency {', '.join(caches) or 'empty'}>"

    def longest(
        self, keys: Sequence[int], now: float, *, but: Callable[[str], bool] = lambda _: False
    ) -> dict[str, Match]:
        """Backend -> how much of the prompt with blocks `keys` it was sent before, with the probability of a hit.

        `p_hit` is the expected share of these blocks that is still there. Backends in `but` are left out.
        """
        matches, rungs = {}, _RUNGS.of(keys)
        for name, cache in self._caches.items():
            known = 0 if but(name) else cache.known(rungs)
            if known:
                chances = [cache.capacity.p_hit(distance) for _, distance in cache.distances(rungs, known)]
                p_hit = self._faded(cache, now) * sum(chances) / max(1, len(chances))
                if p_hit >= _LEAST_P:
                    blocks = _RUNGS.blocks(known)
                    matches[name] = Match(blocks, blocks, float(blocks), p_hit)
        return matches

    def sent(self, backend: str, keys: Sequence[int], now: float) -> Guess:
        """Record that the prompt with blocks `keys` goes to `backend`; returns the belief about it until now."""
        cache = self._caches.get(backend)
        if cache is None:
            cache = self._caches[backend] = self._new_cache()
        rungs = _RUNGS.of(keys)
        known = cache.known(rungs)
        guess = Guess(backend, len(keys), _RUNGS.blocks(known), cache.distances(rungs, known))
        hits = sum(cache.capacity.p_hit(distance) for _, distance in guess.distances) / max(1, len(guess.distances))
        cache.note(rungs, known, len(keys) - round(guess.known * hits))
        cache.sent_at = max(cache.sent_at, now)  # reports of other routers arrive late
        return guess

    def known(self, backend: str, keys: Sequence[int]) -> int:
        """How many of the first blocks of a prompt `backend` was sent before, whether or not they are still there."""
        cache = self._caches.get(backend)
        return 0 if cache is None else _RUNGS.blocks(cache.known(_RUNGS.of(keys)))

    def newest(self, most: int, *, but: Callable[[str], bool] = lambda _: False) -> list[Callable[[int, int], bool]]:
        """Lookups of single blocks, by key and depth, at the backends that were sent prompts last, at most `most`.

        Valid until the next change. Backends in `but` are left out.
        """
        caches = (cache for name, cache in self._caches.items() if not but(name))
        return [cache.holds for cache in heapq.nlargest(most, caches, key=lambda cache: cache.sent_at)]

    def answered(self, backend: str, blocks: int) -> None:
        """Record that `backend` has drawn an answer of so many blocks, which are in its cache too."""
        if cache := self._caches.get(backend):
            cache.clock = min(cache.clock + blocks, MOST_STAMP)

    def observe(self, guess: Guess, hint: Hint) -> None:
        """Learn from `hint` how much of the prompt of `guess` was cached."""
        cache = self._caches.get(guess.backend)
        if cache is None:
            return
        cached = hint.share * guess.blocks
        hits = [distance for depth, distance in guess.distances if depth < cached]
        misses = [distance for depth, distance in guess.distances if depth >= cached + _SLACK_BLOCKS]
        surprise = min((cache.capacity.p_hit(distance) for distance in misses[:1]), default=0.0)
        # the farthest hit and the nearest miss are most informative
        if hits:
            cache.capacity.observe(max(hits), hit=True, weight=hint.weight)
            cache.surprises = 0
        if misses:
            cache.capacity.observe(min(misses), hit=False, weight=hint.weight)
            cache.surprises += not hits and hint.weight == 1.0 and surprise >= _SURPRISING_P
        if cache.surprises >= _SURPRISES:
            self.restarted(guess.backend)

    def restarted(self, backend: str) -> None:
        """Record that the cache of `backend` is empty; its capacity stays."""
        if cache := self._caches.get(backend):
            self._caches[backend] = _Cache(self._new_cache().table, cache.capacity)

    def backends(self) -> tuple[str, ...]:
        """The backends with learned blocks, the one with the fewest blocks first."""
        return tuple(sorted(self._caches, key=lambda name: len(self._caches[name].table)))

    def picture(self, backend: str, most_keys: int, now: float) -> Picture | None:
        """The newest blocks that were sent to `backend`, at most so many; a copy. None if there are none."""
        cache = self._caches.get(backend)
        return None if cache is None else cache.picture(backend, most_keys, now)

    def take_over(self, picture: Picture, now: float) -> None:
        """Merge another router's `picture` of a backend with this router's own."""
        cache = self._caches.get(picture.backend)
        if cache is None:
            cache = self._caches[picture.backend] = self._new_cache()
        cache.take_over(picture, now)

    def forget(self, backend: str) -> None:
        """Remove `backend`."""
        self._caches.pop(backend, None)

    def capacity_blocks(self, backend: str) -> float | None:
        """How many blocks `backend` is believed to keep; None if nothing was sent there."""
        cache = self._caches.get(backend)
        return None if cache is None else cache.capacity.blocks

    def size_bytes(self) -> int:
        """Approximate memory."""
        return sum(cache.table.size_bytes() for cache in self._caches.values())

    def check(self) -> None:
        """Assert that every table is correct and within its bytes."""
        for cache in self._caches.values():
            cache.table.check()
            assert cache.table.size_bytes() <= self._rules.max_bytes, f"{self!r}: over its bound"

    def _new_cache(self) -> _Cache:
        return _Cache(KeyTable(self._rules.max_bytes), CapacityModel(self._rules.first_blocks))

    def _faded(self, cache: _Cache, now: float) -> float:
        return faded(now - cache.sent_at, fresh_s=self._rules.fresh_s, half_life_s=self._rules.half_life_s)
