"""How fast the lines of a job are answered, and so when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable

_LATELY_S = 60.0
"""Answers count less the older they are: those of so many seconds ago a third."""

_LEAST_S = 0.5


class Rate:
    """The answers of the last minute or so. Times are those of `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = self._last_at = clock()
        self._answers = 0.0

    def __repr__(self) -> str:
        return f"<Rate {self.per_second:.1f}/s>"

    @property
    def per_second(self) -> float:
        """Answers in a second."""
        self._fade()
        seen_s = _LATELY_S * -math.expm1(-(self._last_at - self._began_at) / _LATELY_S)
        return self._answers / max(_LEAST_S, seen_s)

    def add(self) -> None:
        """A line was answered."""
        self._fade()
        self._answers += 1.0

    def seconds(self, left: int) -> float | None:
        """Until `left` more lines are answered; None while none was."""
        rate = self.per_second
        return left / rate if rate > 1e-9 else None

    def _fade(self) -> None:
        now = self._clock()
        self._answers *= math.exp(-max(0.0, now - self._last_at) / _LATELY_S)
        self._last_at = max(now, self._last_at)
