"""Turnover: a clock of caches, which goes as fast as prompts are computed; FadingSum: a sum that fades by any clock."""

from __future__ import annotations

from dataclasses import dataclass

_USUAL_CACHE_TOKENS = 262_144
"""The size of a cache if its backend does not report it."""


@dataclass(slots=True)
class Turnover:
    """`at` is how many times the caches were computed anew, on average over all of them.

    What a cache keeps depends on how much was computed since, and not on how long that took.
    """

    at: float = 0.0

    def computed(self, tokens: int, *, cache_tokens: int | None, caches: int) -> None:
        """`tokens` are computed for one cache of `cache_tokens` among so many `caches`."""
        self.at += tokens / (cache_tokens or _USUAL_CACHE_TOKENS) / max(1, caches)


@dataclass(slots=True)
class FadingSum:
    """The sum of added amounts, halved every `half_life` of any clock.

    Times may come out of order; the newest counts.
    """

    half_life: float
    _sum: float = 0.0
    _as_of: float = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add `amount`, at least 0, at the time `now`."""
        passed = now - self._as_of
        if passed > 0.0:
            self._sum *= 0.5 ** (passed / self.half_life)
            self._as_of = now
        self._sum += amount

    def at(self, now: float) -> float:
        """The sum at `now`."""
        passed = now - self._as_of
        return float(self._sum * 0.5 ** (passed / self.half_life)) if passed > 0.0 else self._sum
