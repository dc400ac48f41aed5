"""A moment after which something is late; it moves with every byte that comes, and costs a timer only now and then."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Deadline:
    """Calls `late` once its moment has passed.

    A timer of the event loop is made only for an earlier moment than the present timer's: moving on costs a look at the
    clock. `cancel` it at the end, which lets go of the timer and of `late`.
    """

    __slots__ = ("_armed_at", "_at", "_late", "_loop", "_timer")

    def __init__(self, late: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._late, self._loop = late, loop
        self._at = self._armed_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return "<Deadline>" if self._at == math.inf else f"<Deadline in {self._at - self._loop.time():.1f} s>"

    def within(self, seconds: float) -> None:
        """Be late `seconds` from now."""
        self._at = at = self._loop.time() + seconds
        if at < self._armed_at:
            self._arm(at)

    def clear(self) -> None:
        """Never be late."""
        self._at = math.inf

    def cancel(self) -> None:
        """Never be late, and leave no timer behind."""
        self._at = self._armed_at = math.inf
        # a method of the object that has this deadline: the two would wait for the garbage collector
        self._late = _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_at, self._timer = at, self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._armed_at, self._timer = math.inf, None
        if self._at <= self._loop.time():
            self._at = math.inf
            self._late()
        elif self._at < math.inf:
            self._arm(self._at)


def _nothing() -> None:
    pass
