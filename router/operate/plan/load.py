"""A load over time, such as the number of requests in flight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """An amount of load from `start_s` until `end_s`."""

    start_s: float
    end_s: float
    amount: int = 1


class Load:
    """The sum of spans, a step function of time."""

    def __init__(self, spans: Iterable[Span]) -> None:
        changes: dict[float, int] = {}
        for start_s, end_s, amount in spans:
            if end_s > start_s:
                changes[start_s] = changes.get(start_s, 0) + amount
                changes[end_s] = changes.get(end_s, 0) - amount
        self._times = sorted(changes)
        self._levels = list(accumulate(changes[time] for time in self._times))
        widths = zip(self._times, self._times[1:], self._levels, strict=False)
        self._sums = [0.0, *accumulate((end - start) * level for start, end, level in widths)]

    def at(self, time_s: float) -> int:
        """The load at a time, with what begins then."""
        index = bisect_right(self._times, time_s) - 1
        return self._levels[index] if index >= 0 else 0

    def mean(self, start_s: float, end_s: float) -> float:
        """The mean load between two times; at one time, the load then."""
        if end_s <= start_s:
            return float(self.at(start_s))
        return (self._sum_until(end_s) - self._sum_until(start_s)) / (end_s - start_s)

    def highest(self, start_s: float, end_s: float) -> int:
        """The highest load between two times."""
        return max((level for level, _ in self._pieces(start_s, end_s)), default=0)

    def quantile(self, share: float, start_s: float, end_s: float) -> int:
        """The load that is not exceeded for `share` of the time between two times."""
        enough_s = share * (end_s - start_s)
        level = 0
        for level, seconds in sorted(self._pieces(start_s, end_s)):
            enough_s -= seconds
            if enough_s <= 0:
                return level
        return level

    def _sum_until(self, time_s: float) -> float:
        index = bisect_right(self._times, time_s) - 1
        return self._sums[index] + (time_s - self._times[index]) * self._levels[index] if index >= 0 else 0.0

    def _pieces(self, start_s: float, end_s: float) -> Iterator[tuple[int, float]]:
        """Loads between two times, each with its seconds."""
        if end_s <= start_s:
            return
        index = bisect_right(self._times, start_s)
        since_s, level = start_s, self.at(start_s)
        while index < len(self._times) and self._times[index] < end_s:
            yield level, self._times[index] - since_s
            since_s, level = self._times[index], self._levels[index]
            index += 1
        yield level, end_s - since_s
