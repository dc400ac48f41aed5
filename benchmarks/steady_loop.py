"""An event loop with a clock that stops while the machine gives its process no time.

For benchmarks in real time: a process that is kept waiting for a processor finds all its timers late at once, which
would not happen to a router on a machine of its own. The process's own computation counts in full, and so does waiting
for sockets, since the reason for a late peer is unknown.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_NOISE_S = 0.0005
"""A timer that is late by less than this is no stall: the system's own timers are no better."""


class SteadyLoop(asyncio.SelectorEventLoop):
    """`stalled_s` is how long the clock stood still; with `counts_stalls` it runs on, and stalls are only measured."""

    def __init__(self, *, counts_stalls: bool = False) -> None:
        self.stalled_s = 0.0
        self._counts_stalls = counts_stalls
        super().__init__(_Watched(self))

    def time(self) -> float:
        return time.monotonic() if self._counts_stalls else time.monotonic() - self.stalled_s


class _Watched(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Reports stalls to its loop: time between two calls without computation, and beyond a timeout."""

    def __init__(self, loop: SteadyLoop) -> None:
        super().__init__()
        self._loop = loop
        self._left_at, self._left_cpu_s = time.monotonic(), time.thread_time()

    def select(self, timeout: float | None = None) -> Any:
        began = time.monotonic()
        self._note(began - self._left_at - (time.thread_time() - self._left_cpu_s))
        ready = super().select(timeout)
        self._left_at, self._left_cpu_s = time.monotonic(), time.thread_time()
        if timeout is not None and not ready:
            self._note(self._left_at - began - max(0.0, timeout))
        return ready

    def _note(self, late_s: float) -> None:
        if late_s > _NOISE_S:
            self._loop.stalled_s += late_s


def run_steadily(work: Coroutine[Any, Any, T], *, counts_stalls: bool = False) -> tuple[T, float]:
    """The result of `work`, run to its end on a SteadyLoop, and the time that it was stalled."""
    loop = SteadyLoop(counts_stalls=counts_stalls)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work), loop.stalled_s
