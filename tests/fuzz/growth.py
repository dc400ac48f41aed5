"""Whether the work of a reader for each byte grows, told apart from what a machine does to times.

Work that grows with the square of its input makes each byte dearer with every step to more bytes, without an end. First
touches of memory, caches and a busy neighbour make bytes dearer once, or for every program alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

STEP = 4
"""How many times as many bytes each step has."""

MOST = 2.5
"""How much dearer a byte may become in one step. For quadratic work it is four times, for n log n less than 1.5."""

IN_A_ROW = 2
"""A verdict needs as many steps, one behind the other, in which bytes became dearer."""

_REPEATS = 4
"""The least of so many counts; the first touches memory for the others."""

_LEAST_S = 1e-3
"""Times below this tell nothing."""

_MOST_S = 3.0
"""After a size that takes longer, no larger one is tried."""

_FIXED_S = 0.01
"""What `_fixed_work` takes on that machine."""

Measure = Callable[[int], tuple[float, int]]
"""Seconds that so many bytes take, and how many of them were taken."""


def grows(measure: Measure, most_bytes: int, floor: Measure | None = None) -> bool:
    """Whether each byte costs more and more, the more bytes there are, by more than it does for `floor`.

    `measure` is asked for 4 KB, and for four times as many until `most_bytes`, each several times; `floor` too.
    """
    floor, before, dearer = floor or copies, None, 0
    for size in sizes(most_bytes):
        seconds, taken = _least(measure, size)
        least = min(floor(size)[0] for _ in range(_REPEATS)) / size
        each = seconds / max(taken, 1)
        if before is not None and seconds > _LEAST_S:
            common = max(1.0, least / max(before[1], 1e-12))
            dearer = dearer + 1 if each > MOST * common * before[0] else 0
            if dearer == IN_A_ROW:
                return True
        before = each, least
        if seconds > _MOST_S:
            return False
    return False


def _least(measure: Measure, size: int) -> tuple[float, int]:
    """The least of some measurements, of fewer if each takes long."""
    least, spent = measure(size), 0.0
    for _ in range(_REPEATS - 1):
        spent += least[0]
        if spent > _MOST_S:
            break
        least = min(least, measure(size))
    return least


def sizes(most_bytes: int) -> Iterator[int]:
    """4 KB, 16 KB, ... up to `most_bytes`."""
    size = 4 << 10
    while size <= most_bytes:
        yield size
        size *= STEP


def copies(size: int, clock: Callable[[], float] = time.thread_time) -> tuple[float, int]:
    """What it takes here to copy, decode and encode so many bytes, into memory that is new each time: the floor."""
    raw = b"\x9f" * size
    began = clock()
    with suppress(ValueError):
        (bytes(bytearray(raw)).decode(errors="replace") * 2).encode().find(b"a")
    return clock() - began, size


def pace() -> float:
    """How many times as long as on the machine of our measurements a fixed piece of work takes here now; at least 1."""
    return max(1.0, min(_fixed_work() for _ in range(5)) / _FIXED_S)


def _fixed_work() -> float:
    began = time.thread_time()
    for number in range(2000):
        json.loads(json.dumps({"a": [number, str(number)] * 10}))
    return time.thread_time() - began
