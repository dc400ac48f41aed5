"""The rate at which a queue drains: seconds of predicted cost that leave it per second, learnt while requests wait."""

from __future__ import annotations

_HALF_LIFE_S = 20.0
_BELIEF_S = 5.0
"""Weight of the prior in backend seconds; the prior is that a backend works off one second of cost per second."""


class DrainRate:
    """`now` is in seconds and never decreases. Costs are seconds of one backend's time, as charged by the queue."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._backends = 1
        self._cost_s = self._backend_s = 0.0

    def __repr__(self) -> str:
        return f"<DrainRate {self.per_second(1):.2f} per backend>"

    def waited(self, now: float, backends: int) -> None:
        """Record that requests wait at `now`, and that `backends` can take them. Counts the time since then."""
        self._pass(now)
        self._at, self._backends = now, backends

    def emptied(self, now: float) -> None:
        """Record that no request waits any more. Time does not count until the next `waited`."""
        self._pass(now)
        self._at = None

    def left(self, cost_s: float) -> None:
        """Record that a waiting request of `cost_s` left for a backend."""
        self._cost_s += cost_s

    def per_second(self, backends: int) -> float:
        """Seconds of cost that `backends` together take out of the queue per second; above zero."""
        share = (_BELIEF_S + self._cost_s) / (_BELIEF_S + self._backend_s)
        return max(0.01, share) * max(1, backends)

    def _pass(self, now: float) -> None:
        if self._at is None:
            return
        passed_s = now - self._at
        kept = 0.5 ** (passed_s / _HALF_LIFE_S)
        self._cost_s *= kept
        self._backend_s = self._backend_s * kept + passed_s * self._backends
