"""A sum with exponential decay."""

from __future__ import annotations

from dataclasses import dataclass


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
        self._sum = self.at(now) + amount
        self._as_of = max(now, self._as_of)

    def at(self, now: float) -> float:
        """The sum at `now`."""
        passed = max(0.0, now - self._as_of)
        return float(self._sum * 0.5 ** (passed / self.half_life))
