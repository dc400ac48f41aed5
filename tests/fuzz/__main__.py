"""Searches for the bytes that cost each reader most: `make fuzz`, or `python -m tests.fuzz --help`.

Prints a table, and fails if work grows faster than its input, if a reader holds the event loop, or if it raises what
it should not.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tests.fuzz.readers import READERS
from tests.fuzz.search import Cost, Pattern, cost_of, worst

SIZES = (64 << 10, 1 << 20, 16 << 20)
MOST_HOLD_S = 0.05
MOST_GROWTH = 2.0
"""How much more a byte of 1 MB may take than one of 64 KB; times of a busy machine vary."""

_NOISE_S = 0.02
"""Times below this tell nothing."""

_LONGEST_BYTES = 4 << 20
"""How many bytes of the patterns that may take longest in one turn are tried."""

_AGAIN = 3
"""How often a hold that is too long is measured again; the shortest counts."""

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
    found = worst(reader, random.Random(asked.seed), most=asked.patterns, until=time.monotonic() + asked.seconds)
    shown, costs, tried = [], list[Cost](), list[tuple[Pattern, int]]()
    for size in SIZES:
        if size > asked.most_bytes:
            shown.append("not tried")
            continue
        if costs and costs[-1].seconds * 16 > MOST_S:
            shown.append(f"over {costs[-1].seconds * 16:.0f} s")
            continue
        # 16 million pieces would be the work of this program
        pattern = replace(found.pattern, cut=max(found.pattern.cut, 64 if size > 1 << 20 else 1))
        tried.append((pattern, size))
        costs.append(cost_of(reader, pattern, size))
        refused = "" if costs[-1].taken >= size else f" (refused after {_size(costs[-1].taken)})"
        shown.append(f"{costs[-1].seconds * 1e3:,.1f} ms{refused}")
    # the pattern that costs most for a byte is not always the one that is longest in one turn
    largest = min(_LONGEST_BYTES, max(cost.taken for cost in costs))
    others = [(replace(each, cut=max(each.cut, 4096)), largest) for each in found.longest]
    costs += [cost_of(reader, *each) for each in others]
    tried += others
    hold_s = max(cost.hold_s for cost in costs)
    name_of_pattern = str(found.pattern).replace("|", "\\|")
    hold = "on a thread" if reader.on_thread else f"{hold_s * 1e3:.1f} ms"
    row = f"| {name} | {found.tried:,} | `{name_of_pattern}` | {' | '.join(shown)} | {hold} |"
    if hold_s > MOST_HOLD_S and not reader.on_thread:
        # a machine that does something else as well makes a hold longer, and never shorter
        longest = max(zip((cost.hold_s for cost in costs), tried, strict=True), key=lambda each: each[0])[1]
        hold_s = min(hold_s, *(cost_of(reader, *longest).hold_s for _ in range(_AGAIN)))
    bad, first, second = [], costs[0], costs[1]
    is_long = second.taken > first.taken and second.seconds > _NOISE_S
    if is_long and second.seconds / second.taken > MOST_GROWTH * first.seconds / first.taken + 20e-9:
        bad.append(f"{name}: the work for each byte grows")
    if hold_s > MOST_HOLD_S and not reader.on_thread:
        bad.append(f"{name}: holds the event loop for {hold_s * 1e3:.0f} ms")
    return row, bad


def _size(count: int) -> str:
    return f"{count / 1024:,.0f} KB" if count < 1 << 20 else f"{count / 2**20:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
