"""Threads that long pieces of work take turns on, so that a long one does not delay a short one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from router.waiters import Waiters

_Result = TypeVar("_Result")


class Unfinished(NamedTuple):
    """A turn has ended before its work."""


UNFINISHED = Unfinished()


class Turns:
    """Runs work on `threads`. A turn ends once the work has yielded numbers with a sum of `turn` or more.

    Owners that wait get turns in rotation, and so does the work of each owner.
    """

    def __init__(self, threads: int, turn: int, *, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free, self._turn = threads, turn
        self._waiters = Waiters[Hashable, None, bool](take_back=lambda *_: self._release(), left=lambda: None)

    def __repr__(self) -> str:
        return f"<Turns: {self._free} free threads, {len(self._waiters)} pieces of work wait>"

    async def run(self, owner: Hashable, work: Generator[int, None, _Result]) -> _Result:
        """The result of `work`, or what it raises. A cancelled one ends behind the turn that runs."""
        loop = asyncio.get_running_loop()
        while True:
            await self._thread(owner)
            taken = loop.run_in_executor(self._threads, take_turn, work, self._turn)
            taken.add_done_callback(self._taken)
            try:
                # a thread cannot be interrupted: it is free when the turn is over
                result = await asyncio.shield(taken)
            finally:
                # an error that refers to itself by this frame would keep the text until the next garbage collection
                del taken
            if not isinstance(result, Unfinished):
                return result

    def close(self, *, waits: bool = True) -> None:
        """End the threads; unless it `waits`, those that work end later."""
        self._threads.shutdown(wait=waits, cancel_futures=True)

    async def _thread(self, owner: Hashable) -> None:
        """Wait until a thread is free for `owner`, and take it."""
        if self._free:
            self._free -= 1
            return
        await self._waiters.wait(owner, None)

    def _taken(self, turn: asyncio.Future[Any]) -> None:
        if not turn.cancelled():
            # one that was cancelled meanwhile has no reader of it
            turn.exception()
        self._release()

    def _release(self) -> None:
        """Give a free thread to the owner that waits longest."""
        if not self._waiters.serve(lambda _: True, 1):
            self._free += 1


def at_once(turns: Generator[int, None, _Result]) -> _Result:
    """The result of `turns`, which are all taken now."""
    while True:
        try:
            next(turns)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]


def once(function: Callable[[], _Result]) -> Generator[int, None, _Result]:
    """`function()`, in one turn."""
    yield 0
    return function()


def take_turn(work: Generator[int, None, _Result], turn: int) -> _Result | Unfinished:
    """One turn of `work`, which ends as soon as that has yielded numbers with a sum of `turn`; its result, if it has
    ended."""
    done = 0
    while done < turn:
        try:
            done += next(work)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
    return UNFINISHED
