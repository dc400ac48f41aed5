"""Counts the work of a piece of code: what it does, not how long it takes."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple


class Work(NamedTuple):
    """Lines of Python that were executed, loops and calls counted each time, and bytes that were allocated by them."""

    lines: int
    allocated: int


def work_of(run: Callable[[], object]) -> Work:
    """The work of `run()`, in this thread. A copy is counted by what it allocates, whichever library makes it."""
    lines = allocated = base = 0

    def look(_: FrameType, event: str, __: Any) -> Any:
        nonlocal lines, allocated, base
        if event == "line":
            lines += 1
            now, peak = tracemalloc.get_traced_memory()
            allocated += max(0, peak - base)
            tracemalloc.reset_peak()
            base = now
        return look

    before = sys.gettrace()
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        sys.settrace(look)
        run()
    finally:
        sys.settrace(before)
        allocated += max(0, tracemalloc.get_traced_memory()[1] - base)
        tracemalloc.stop()
    return Work(lines, allocated)
