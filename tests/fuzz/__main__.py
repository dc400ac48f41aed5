"""Searches for the bytes that cost each reader most: `make fuzz`, or `python -m tests.fuzz --help`.

Prints a table, and fails if work grows faster than its input, if a reader holds the event loop longer the more it is
given, or if it raises what it should not. No time alone decides (`tests/fuzz/growth.py`).
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from tests.fuzz.growth import Measure, grows, pace
from tests.fuzz.readers import READERS
from tests.fuzz.runs import Reader
from tests.fuzz.search import Cost, Found, Pattern, Raised, cost_of, hold_on_thread, worst

SIZES = (64 << 10, 1 << 20, 16 << 20)
MOST_HOLD_S = 0.05
"""On a machine like the one on which pages are measured (`growth.pace`)."""

MOST_GROWTH = 2.0
"""How much more a byte of 1 MB may take than one of 64 KB before growth is looked at step by step."""

_TIMES = 4
"""So many times the longest hold is too long even if more bytes do not make it longer."""

_LONGEST_BYTES = 4 << 20
"""How many bytes of the patterns that may take longest in one turn are tried."""

MOST_S = 30.0
"""16 MB that would take longer are not tried."""


@dataclass(frozen=True)
class Asked:
    """What is asked of the search: so many patterns, tried for so many seconds, and sizes up to `most_bytes`."""

    patterns: int
    seconds: float
    most_bytes: int
    seed: int


def main() -> int:
    """Run the search; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.fuzz")
    parser.add_argument("readers", nargs="*", metavar="READER", help="names as the table has them; default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="for the search of all; default: 600")
    parser.add_argument("--patterns", type=int, default=10_000, help="for each reader; default: 10,000")
    parser.add_argument("--most", type=int, default=16, metavar="MB", help="the largest input; default: 16")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    options = parser.parse_args()
    names, processes = options.readers or list(READERS), os.cpu_count() or 1
    seconds = options.seconds * min(processes, len(names)) / len(names)
    asked = Asked(options.patterns, seconds, options.most << 20, options.seed)
    print("| reader | patterns | worst | 64 KB | 1 MB | 16 MB | longest hold |\n|---|---|---|---|---|---|---|")
    bad: list[str] = []
    with ProcessPoolExecutor(processes, initializer=logging.disable) as pool:
        for row, found in pool.map(partial(row_of, asked), names):
            print(row, flush=True)
            bad += found
    print("\n".join(bad), file=sys.stderr)
    return bool(bad)


def row_of(asked: Asked, name: str) -> tuple[str, list[str]]:
    """The row of one reader, and what is bad about it."""
    reader = READERS[name]
    try:
        found = worst(reader, random.Random(asked.seed), most=asked.patterns, until=time.monotonic() + asked.seconds)
        tried = dict(_tried(asked, reader, found))
    except Raised as raised:
        return f"| {name} | | {raised} | | | | |", [f"{name}: {raised}"]
    shown = []
    for size in SIZES:
        cost = next((cost for (_, of), cost in tried.items() if of == size), None)
        if cost is None:
            shown.append("not tried")
            continue
        refused = "" if cost.taken >= size else f" (refused after {_size(cost.taken)})"
        shown.append(f"{cost.seconds * 1e3:,.1f} ms{refused}")
    holds = {each: cost.hold_s for each, cost in tried.items()}
    if reader.on_thread and not reader.at_start:
        most = max(size for _, size in tried)
        holds = {each: _hold(reader, *each) for each in tried if each[1] in (most, _LONGEST_BYTES)}
    longest = max(holds, key=holds.__getitem__)
    name_of_pattern = str(found.pattern).replace("|", "\\|")
    hold = f"{holds[longest] * 1e3:.1f} ms{' (thread)' * reader.on_thread}"
    hold = "at the start" if reader.at_start else hold
    row = f"| {name} | {found.tried:,} | `{name_of_pattern}` | {' | '.join(shown)} | {hold} |"
    bad, costs = [], list(tried.values())
    is_dearer = len(costs) > 1 and _each(costs[1]) > MOST_GROWTH * _each(costs[0])
    if (is_dearer or costs[0].seconds > MOST_S / 16) and grows(_of(reader, found.pattern), reader.most_bytes):
        bad.append(f"{name}: the work for each byte grows with {found.pattern}")
    if not reader.at_start and (hold_s := _too_long(reader, *longest, holds[longest])):
        bad.append(f"{name}: holds the event loop for {hold_s * 1e3:.0f} ms with {longest[0]}")
    return row, bad


def _tried(asked: Asked, reader: Reader, found: Found) -> Iterator[tuple[tuple[Pattern, int], Cost]]:
    """The worst pattern with each size that is asked for, while that takes seconds; then others, by long turns."""
    largest, cost = 0, None
    for size in SIZES:
        if size > asked.most_bytes or (cost is not None and cost.seconds * 16 > MOST_S):
            break
        # 16 million pieces would be the work of this program
        pattern = found.pattern.by(64 if size > 1 << 20 else 1)
        cost = cost_of(reader, pattern, size)
        largest = max(largest, cost.taken)
        yield (pattern, size), cost
    for pattern in found.longest:
        size = min(_LONGEST_BYTES, largest)
        yield (pattern.by(4096), size), cost_of(reader, pattern.by(4096), size)


def _of(reader: Reader, pattern: Pattern) -> Measure:
    def measure(size: int) -> tuple[float, int]:
        cost = cost_of(reader, pattern.by(64 if size > 1 << 20 else 1), size)
        return cost.seconds, cost.taken

    return measure


def _too_long(reader: Reader, pattern: Pattern, size: int, hold_s: float) -> float:
    """Seconds of its longest turn, or 0 if that is none too long."""

    most_s = MOST_HOLD_S * pace()
    if hold_s <= most_s:
        return 0.0
    hold_s = min(hold_s, *(_hold(reader, pattern, size) for _ in range(3)))
    if hold_s > _TIMES * most_s:
        return hold_s
    # one that is bounded does not get longer
    small_s = min(_hold(reader, pattern, size // 16) for _ in range(3))
    return hold_s if hold_s > most_s and hold_s > _TIMES * small_s else 0.0


def _hold(reader: Reader, pattern: Pattern, size: int) -> float:
    """Seconds for which it holds the event loop at most: in its turns there, or from a thread."""
    return hold_on_thread(reader, pattern, size) if reader.on_thread else cost_of(reader, pattern, size).hold_s


def _each(cost: Cost) -> float:
    return cost.seconds / max(cost.taken, 1)


def _size(count: int) -> str:
    return f"{count / 1024:,.0f} KB" if count < 1 << 20 else f"{count / 2**20:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
