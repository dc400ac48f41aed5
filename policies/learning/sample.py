"""Which of many observations a model learns from, so that learning costs no more at high rates than at low ones."""

from __future__ import annotations


class ObservationSample:
    """Takes every observation while few come: `burst` at once, and `per_s` a second in the long run (token bucket).

    Models that forget old observations learn as well from a sample as from all, because within a second nothing changes
    that more observations could show.
    """

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at = burst, 0.0

    def __repr__(self) -> str:
        return f"<ObservationSample of {self._per_s:g} a second, {self._left:.1f} left>"

    def takes(self, now: float) -> bool:
        """Is the observation of time `now`, in seconds, one to learn from? Counts it if it is."""
        left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at, is_taken = now, left >= 1.0
        self._left = left - 1.0 if is_taken else left
        return is_taken
