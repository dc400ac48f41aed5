"""An event loop whose clock jumps to the next timer instead of waiting for it: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.BaseSelector):
    """Never sleeps: where the loop would wait for a timer, its clock is moved on by that time."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._real, self._loop = selectors.DefaultSelector(), loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            # no timer and nothing ready: only a thread or a socket can wake the loop
            return self._real.select(5.0)
        ready = self._real.select(0)
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
    """`now` is in seconds and begins at 0. Threads and sockets still take real time, in which the clock may jump."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Now."""
        return self.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, run to its end on a VirtualTimeLoop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
