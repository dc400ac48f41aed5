"""Sliding windows over the last minute, and quantiles of the values in them, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

SLOT_S = 5.0
SLOTS = 12
WINDOW_S = SLOT_S * SLOTS

_GROWTH = math.log(1.04)
_LEAST_S = 1e-4
_BUCKETS = math.ceil(math.log(1e4 / _LEAST_S) / _GROWTH)


class Window(Generic[T]):
    """A ring of `SLOTS` values made by `make`, each for `SLOT_S` seconds; a new value replaces the oldest.

    So the window covers the last 55 to 60 seconds: the newest slot is still being filled.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._slots: list[tuple[int, T] | None] = [None] * SLOTS

    def __repr__(self) -> str:
        return f"<Window {[slot and slot[1] for slot in self._slots]}>"

    def at(self, now: float) -> T:
        """The value for `now`, in seconds of a clock that does not run backwards."""
        number = int(now // SLOT_S)
        slot = self._slots[number % SLOTS]
        if slot is None or slot[0] != number:
            slot = self._slots[number % SLOTS] = (number, self._make())
        return slot[1]

    def within(self, now: float) -> Iterator[T]:
        """The values of the window that ends at `now`."""
        newest = int(now // SLOT_S)
        return (slot[1] for slot in self._slots if slot is not None and newest - SLOTS < slot[0] <= newest)


class Sketch:
    """Counts durations in buckets each 4 % wider than the one before, so that quantiles are at most 2 % off.

    From 0.1 ms to 10,000 s, which is 470 buckets at most; values outside count as the nearest bound.
    Source: Masson, Rim, Lee, DDSketch: a fast and fully-mergeable quantile sketch with relative-error guarantees,
    VLDB 2019.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<Sketch of {len(self)}>"

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, seconds: float) -> None:
        """Count one duration."""
        bucket = math.ceil(math.log(seconds / _LEAST_S) / _GROWTH) if seconds > _LEAST_S else 0
        self._counts[min(bucket, _BUCKETS)] += 1

    @classmethod
    def merged(cls, sketches: Iterable[Sketch]) -> Sketch:
        """A sketch with the counts of all `sketches`."""
        whole = cls()
        for sketch in sketches:
            whole._counts.update(sketch._counts)
        return whole

    def quantile(self, share: float) -> float | None:
        """The duration that `share` (0..1) of all do not exceed; None if the sketch is empty."""
        rank, seen = max(1, math.ceil(share * len(self))), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return _middle(bucket)
        return None

    def count_above(self, seconds: float) -> int:
        """How many durations were longer than `seconds`; those within 2 % of it may be counted either way."""
        return sum(count for bucket, count in self._counts.items() if _middle(bucket) > seconds)


def _middle(bucket: int) -> float:
    """A duration at most 2 % from every duration in the bucket; the bucket's bounds are a factor of 1.04 apart."""
    upper = _LEAST_S * math.exp(bucket * _GROWTH)
    return upper if bucket == 0 else upper * 2 / (1 + math.exp(_GROWTH))
