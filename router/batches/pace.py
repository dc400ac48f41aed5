"""Work in threads that does not take the interpreter away from the event loop, and ends when the router does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from router.text.turns import Turns

WORK_S = 0.002
REST_S = 0.006
"""A thread that works for WORK_S rests for REST_S: it takes a quarter of the interpreter at most."""

MOST_THREADS = 16
"""Threads that batches have at most; further work waits for one."""


LIST_THREADS = 2
"""Threads in which lists are read, beside these: however many a client asks for, no upload waits for one."""

LISTED_AT_ONCE = 256
"""Entries of a list that are read in one turn of its tenant."""


class Interrupted(Exception):
    """The router stops, and the work is done by the next one."""


class Closable(Protocol):
    """Something that is open."""

    def close(self) -> None:
        """Close it."""
        ...


P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Closable)


class Pace:
    """The threads of batches, and their pace until it is stopped.

    They are no others' threads: while a store hangs, the rest of the router does not wait for it.
    """

    def __init__(
        self,
        *,
        threads: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._threads = threads or ThreadPoolExecutor(MOST_THREADS, "batches")
        self._lists = Turns(LIST_THREADS, LISTED_AT_ONCE, name="lists of batches")
        self._clock, self._sleep, self._stopped = clock, sleep, threading.Event()

    def __repr__(self) -> str:
        return f"<Pace{' stopped' if self._stopped.is_set() else ''}>"

    def stop(self) -> None:
        """Interrupt all work; `run` goes on for what is to be closed."""
        self._stopped.set()

    def close(self) -> None:
        """Start no more work, and let threads go that have none."""
        self._threads.shutdown(wait=False)
        self._lists.close(waits=False)

    async def run(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """What `work` returns, from a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **named))

    async def listed(self, tenant: str, work: Generator[int, None, T]) -> T:
        """What `work` returns, from a thread that tenants use in turns. It yields how many entries it has read
        since."""
        return await self._lists.run(tenant, work)

    async def opened(self, make: Callable[[], C | None]) -> C | None:
        """What `make` opens in a thread; closed again if this is cancelled meanwhile."""
        making = asyncio.ensure_future(self.run(make))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait((making,))
            if making.exception() is None and (made := making.result()) is not None:
                made.close()
            raise

    def through(self, items: Iterable[T]) -> Iterator[T]:
        """`items`, with a rest after each WORK_S of the time that their consumer takes. Raises Interrupted."""
        until = self._clock() + WORK_S
        for item in items:
            yield item
            if self._clock() >= until:
                self._sleep(REST_S)
                until = self._clock() + WORK_S
            if self._stopped.is_set():
                raise Interrupted
