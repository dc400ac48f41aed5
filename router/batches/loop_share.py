"""The share of the event loop that lines take while other requests come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

SHARE = 0.125
"""Other requests wait for each step of a line that is before them in the loop. What a line causes outside of its own
task (answers that arrive, what is counted later) takes about as long again, and is not measured."""

_GUESS_S = 0.001
_NEW = 0.05
"""The share of the last line in the mean."""

T = TypeVar("T")


class LoopShare:
    """Measures how long lines hold the event loop, and says when the next one may begin. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mean_s = _GUESS_S
        self._next_at = 0.0

    def __repr__(self) -> str:
        return f"<LoopShare {self._mean_s * 1e3:.2f} ms a line>"

    def wait_s(self) -> float:
        """Seconds until a line may begin; 0 or less: now."""
        return self._next_at - self._clock()

    def begin(self) -> None:
        """A line begins."""
        self._next_at = self._clock() + self._mean_s / SHARE

    async def measured(self, line: Callable[[], Awaitable[T]]) -> T:
        """What `line` returns; its time counts."""
        steps = _Steps(line(), self._clock)
        try:
            return await steps
        finally:
            self._mean_s += _NEW * (steps.held_s - self._mean_s)


class _Steps(Awaitable[T]):
    """`work`, and for how many seconds its steps held the event loop."""

    def __init__(self, work: Awaitable[T], clock: Callable[[], float]) -> None:
        self._work, self._clock, self.held_s = work.__await__(), clock, 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = self._work.__next__
        while True:
            began_at = self._clock()
            try:
                awaited = step()
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self.held_s += self._clock() - began_at
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - it is for the work, such as its cancellation
                step = self._raising(error)
            else:
                step = self._work.__next__

    def _raising(self, error: BaseException) -> Callable[[], Any]:
        return lambda: self._work.throw(error)
