"""Work that no request waits for: done together, a moment after the first of it was given."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

AFTER_S = 0.01
"""How long work waits. Done together it takes less time, because its code and data stay in the CPU's cache."""

MOST_AT_ONCE = 256
"""After so many pieces the event loop has its turn."""

_log = logging.getLogger("pointsman.later")


class Do(Protocol):
    """Does `work` with these arguments, now or in a moment."""

    def __call__(self, work: Callable[..., object], *args: Any) -> None:
        """Take it over."""
        ...


def at_once(work: Callable[..., object], *args: Any) -> None:
    """Do it now."""
    work(*args)


class Later:
    """Does in order what it is given, `after_s` later on the event loop; without a running loop, or with None, at once.

    It holds as much as calls give it in that time. What fails is logged, and the rest goes on.
    """

    def __init__(self, after_s: float | None = AFTER_S) -> None:
        self._after_s = after_s
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_due = False
        self._thread = 0

    def __repr__(self) -> str:
        return f"<Later {len(self._waiting)} waiting>"

    def __call__(self, work: Callable[..., object], *args: Any) -> None:
        """Do `work` with `args` in a moment."""
        self._waiting.append((work, args))
        if not self._is_due:
            self._thread = threading.get_ident()
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                loop = None
            if loop is None or self._after_s is None:
                self.flush()
            else:
                self._is_due = True
                loop.call_later(self._after_s, self._do, MOST_AT_ONCE, loop)

    def flush(self) -> None:
        """Do all of it now; from another thread nothing is done."""
        if threading.get_ident() == self._thread:
            self._do(len(self._waiting))

    def _do(self, most: int, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Do the first `most` pieces. The `loop` that has called this calls it again for the rest."""
        waiting = self._waiting
        while waiting and most:
            most -= 1
            work, args = waiting.popleft()
            try:
                work(*args)
            except Exception:  # noqa: BLE001 - one piece of work is not the others'
                _log.exception("work behind a request failed")
        if loop is not None:
            self._is_due = bool(waiting)
            if self._is_due:
                loop.call_soon(self._do, MOST_AT_ONCE, loop)
