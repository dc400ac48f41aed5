"""How long to wait before the next attempt to reach a backend."""

from __future__ import annotations

import random


class Backoff:
    """Doubles from `first_s` to `longest_s`, with jitter so that routers do not come back in step."""

    def __init__(self, rng: random.Random, *, first_s: float = 0.1, longest_s: float = 10.0) -> None:
        self._rng, self._first_s, self._longest_s = rng, first_s, longest_s
        self._failures = 0

    def __repr__(self) -> str:
        return f"<Backoff after {self._failures} failures>"

    def next_s(self, spent_s: float = 0.0) -> float:
        """Seconds to wait after one more failure, between half and all of the current step.

        The attempt itself took `spent_s`, which is part of the step; a pause of the first step is left at least.
        """
        step_s = min(self._longest_s, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return max(self._first_s, step_s - spent_s) * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """The backend was reached: begin again at `first_s`."""
        self._failures = 0
