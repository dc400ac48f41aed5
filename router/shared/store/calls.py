"""Calls to a store that may not answer: each with a deadline, and given up without blocking its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from router.shared.store.base import Fault, StoreFailed

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")


class Calls:
    """Runs calls in tasks of their own. A client that swallows its cancellation, as asyncio.wait_for of Python 3.11
    can, must delay neither the deadline nor the code that cancels it."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<Calls, {len(self._tasks)} under way>"

    async def run(
        self,
        call: Callable[[*_Arguments], Coroutine[object, object, _T]],
        *arguments: *_Arguments,
        within_s: float | None = None,
    ) -> _T:
        """The result of `call(*arguments)`. Raises StoreFailed after the deadline, and the call's own errors.

        It takes a function: a coroutine that were made before would never run if this is cancelled before it begins.
        """
        within_s = self._within_s if within_s is None else within_s
        task = asyncio.create_task(call(*arguments))
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
        """Wait for the calls that were given up and have not ended yet."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._within_s if within_s is None else within_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has gone: read the exception so that asyncio does not log it
