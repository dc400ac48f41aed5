"""An event loop with a clock that jumps to the next timer instead of waiting for it: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


_PATIENCE_S = 60.0
"""Real seconds that a thread or a socket may take to wake the loop."""


class _Jumping(selectors.BaseSelector):
    """Sleeps only for threads: if the loop would wait for a timer alone, its clock is advanced by that time."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._real, self._loop = selectors.DefaultSelector(), loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            # no timer and nothing ready: only a thread or a socket can wake the loop
            ready = self._real.select(_PATIENCE_S)
            if not ready:
                raise RuntimeError(f"at {self._loop.now} s every task waits, and no timer is set")
            return ready
        # the end of a thread's work wakes the loop
        ready = self._real.select(_PATIENCE_S if self._loop.in_threads and timeout > 0 else 0)
        if not ready and timeout > 0:
            self._loop.now += timeout
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Any:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`now` is in seconds and begins at 0. Sockets still take real time, in which the clock may jump.

    It stands still while an executor works: work takes no time here, however busy the machine is. `in_threads` counts
    what executors work on.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.in_threads = 0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Now."""
        return self.now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """As every loop, and the clock stands still until the work is done, or nothing awaits it any more."""
        future = super().run_in_executor(executor, func, *args)
        self.in_threads += 1
        future.add_done_callback(self._left_a_thread)
        return future

    def _left_a_thread(self, _: asyncio.Future[Any]) -> None:
        self.in_threads -= 1


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, run to its end on a VirtualTimeLoop.

    An exception in a timer ends the run too, and is raised: a usual loop would log it, and a task that waits for the
    timer's effect would wait for ever. Raises RuntimeError if every task waits and no timer is set.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_with_its_timers(work))


async def _with_its_timers(work: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "it is run as a task"
    raised: list[BaseException] = []

    def hear(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # exceptions of callbacks only; those of tasks that are not awaited are logged as usual
        if "handle" not in context or "exception" not in context:
            loop.default_exception_handler(context)
            return
        raised.append(context["exception"])
        task.cancel()

    loop.set_exception_handler(hear)
    try:
        return await work
    finally:
        if raised:
            raise raised[0]
