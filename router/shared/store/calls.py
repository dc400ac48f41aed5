"""Calls to a store that may not answer: each within a deadline, and none that holds up who gave it up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from router.shared.store.base import Fault, StoreFailed

_T = TypeVar("_T")


class Calls:
    """Runs calls in tasks of their own: a client that swallows its cancellation, as asyncio.wait_for of Python 3.11
    can, must hold up neither the deadline nor whoever cancels."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<Calls, {len(self._tasks)} under way>"

    async def run(self, call: Coroutine[object, object, _T], *, within_s: float | None = None) -> _T:
        """What `call` returns. Raises StoreFailed when its time is over, and what it raises itself."""
        within_s = self._within_s if within_s is None else within_s
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait({task}, timeout=within_s)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            raise StoreFailed(Fault.SLOW, f"no answer within {within_s} s")
        return task.result()

    async def end(self, *, within_s: float | None = None) -> None:
        """Wait for those that were given up and have not ended yet."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._within_s if within_s is None else within_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever stopped waiting for it does not want to know
