"""Searches for the bytes that cost each reader most: `make fuzz`, or `python -m tests.fuzz --help`.

Prints a table, and fails if work grows faster than its input, if a reader holds the event loop, or if it raises what
it should not.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from dataclasses import replace

from tests.fuzz.readers import READERS
from tests.fuzz.search import cost_of, worst

SIZES = (64 << 10, 1 << 20, 16 << 20)
MOST_HOLD_S = 0.05
MOST_GROWTH = 2.0
"""How much more a byte of 1 MB may take than one of 64 KB; times of a busy machine vary."""

_NOISE_S = 0.02
"""Times below this tell nothing."""

MOST_S = 30.0
"""16 MB that would take longer are not tried."""


def main() -> int:
    """Run the search; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.fuzz")
    parser.add_argument("readers", nargs="*", metavar="READER", help="names as the table has them; default: all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all readers together; default: an hour")
    parser.add_argument("--patterns", type=int, default=10_000, help="for each reader; default: 10,000")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    options = parser.parse_args()
    # libraries tell of each byte that they refuse
    logging.disable()
    names = options.readers or list(READERS)
    print("| reader | patterns | worst | 64 KB | 1 MB | 16 MB | longest hold |\n|---|---|---|---|---|---|---|")
    bad, ends = [], time.monotonic() + options.seconds
    for number, name in enumerate(names):
        reader, left = READERS[name], len(names) - number
        # the rest of the time is for the sizes
        until = time.monotonic() + 0.6 * (ends - time.monotonic()) / left
        found = worst(reader, random.Random(options.seed), most=options.patterns, until=until)
        shown, costs = [], []
        for size in SIZES:
            if costs and costs[-1].seconds * 16 > MOST_S:
                shown.append(f"over {costs[-1].seconds * 16:.0f} s")
                continue
            # 16 million pieces would be the work of this program
            pattern = replace(found.pattern, cut=max(found.pattern.cut, 64 if size > 1 << 20 else 1))
            costs.append(cost_of(reader, pattern, size))
            refused = "" if costs[-1].taken == size else f" (refused after {_size(costs[-1].taken)})"
            shown.append(f"{costs[-1].seconds * 1e3:,.1f} ms{refused}")
        # what the event loop gives at once is 256 KB at most, whoever reads more does it elsewhere
        hold_s = max(cost.hold_s for cost in costs)
        name_of_pattern = str(found.pattern).replace("|", "\\|")
        hold = "on a thread" if reader.on_thread else f"{hold_s * 1e3:.1f} ms"
        print(f"| {name} | {found.tried:,} | `{name_of_pattern}` | {' | '.join(shown)} | {hold} |", flush=True)
        first, second = costs[0], costs[1]
        is_long = second.taken > first.taken and second.seconds > _NOISE_S
        if is_long and second.seconds / second.taken > MOST_GROWTH * first.seconds / first.taken + 20e-9:
            bad.append(f"{name}: the work for each byte grows")
        if hold_s > MOST_HOLD_S and not (reader.on_thread or reader.holds):
            bad.append(f"{name}: holds the event loop for {hold_s * 1e3:.0f} ms")
    print("\n".join(bad), file=sys.stderr)
    return bool(bad)


def _size(count: int) -> str:
    return f"{count / 1024:,.0f} KB" if count < 1 << 20 else f"{count / 2**20:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
