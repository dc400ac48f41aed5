"""Work in threads that does not take the interpreter away from the event loop, and ends when the router does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

WORK_S = 0.002
REST_S = 0.006
"""A thread that works for WORK_S rests for REST_S: it takes a quarter of the interpreter at most."""


class Interrupted(Exception):
    """The router stops, and the work is done by the next one."""


class Closable(Protocol):
    """Something that is open."""

    def close(self) -> None:
        """Close it."""
        ...


T = TypeVar("T")
C = TypeVar("C", bound=Closable)


class Pace:
    """Paces threads until it is stopped."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._clock, self._sleep, self._stopped = clock, sleep, threading.Event()

    def __repr__(self) -> str:
        return f"<Pace{' stopped' if self._stopped.is_set() else ''}>"

    def stop(self) -> None:
        """Interrupt all work."""
        self._stopped.set()

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


async def opened(make: Callable[[], C | None]) -> C | None:
    """What `make` opens in a thread; closed again if this is cancelled meanwhile."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait((making,))
        if making.exception() is None and (made := making.result()) is not None:
            made.close()
        raise
