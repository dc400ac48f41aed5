"""A sum with exponential decay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FadingSum:
    """The sum of added amounts, halved every `half_life_s` seconds. Times may come out of order; the newest counts."""

    half_life_s: float = 300.0
    _sum: float = 0.0
    _as_of: float = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add `amount`, at least 0, at the time `now` in seconds."""
        self._sum = self.at(now) + amount
        self._as_of = max(now, self._as_of)

    def at(self, now: float) -> float:
        """The sum at `now`."""
        passed_s = max(0.0, now - self._as_of)
        return float(self._sum * 0.5 ** (passed_s / self.half_life_s))
