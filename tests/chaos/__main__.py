"""The long form: every fault, and pairs drawn with a seed. `make chaos`, or `python -m tests.chaos --help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tests.chaos.experiment import Result, Times, run, summary
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.load import Shape
from tests.chaos.pairs import draw
from tests.chaos.shrinking import shrunk
from tests.chaos.system import a_system

LOADS = {"vllm": Shape(per_s=6)}
"""The load of backends that are slower than stand-ins: one of two must be able to serve it alone."""

LONG = Times(before=1.0, fault=4.0, after=1.0, recovery=15.0)
Faults = tuple[Fault, ...]


def name_of(faults: Faults) -> str:
    """The name of an experiment."""
    return " + ".join(fault.name for fault in faults)


class Long:
    """Runs experiments with progress on the screen, and keeps their results in a file."""

    def __init__(self, seed: int, file: Path | None, minutes: float | None) -> None:
        self._seed, self._file = seed, file
        self._began = time.monotonic()
        self._ends = self._began + 60 * minutes if minutes else None
        self._kept = json.loads(file.read_text()) if file and file.exists() else {}
        self.broken: list[str] = []
        self.is_complete = True

    async def run(self, experiments: Sequence[Faults]) -> None:
        """Run those without a result in the file, one system for all of a plan."""
        waiting = [faults for faults in experiments if name_of(faults) not in self._kept]
        in_order = sorted(waiting, key=lambda faults: repr(faults[0].plan))
        for plan, group in groupby(in_order, key=lambda faults: faults[0].plan):
            rest = list(group)
            while rest and not self._is_late():
                async with a_system(plan) as system:
                    while rest and not self._is_late():
                        faults = rest.pop(0)
                        result = await run(system, faults, LONG, LOADS.get(plan.backends, Shape()))
                        self._keep(result)
                        if result.violations or any(fault.forgotten for fault in faults):
                            # what it left must not be found again
                            break
                if result.had_no_effect:
                    self.broken.append(name_of(faults))
                elif result.violations:
                    await self._shrink(faults)

    def _is_late(self) -> bool:
        is_late = self._ends is not None and time.monotonic() > self._ends
        self.is_complete &= not is_late
        return is_late

    def _keep(self, result: Result) -> None:
        self._say(str(result))
        self._kept[" + ".join(result.faults)] = summary(result)
        if self._file:
            self._file.write_text(json.dumps(self._kept, indent=1) + "\n")

    async def _shrink(self, faults: Faults) -> None:
        smallest, times, shape = await shrunk(faults, LONG, LOADS.get(faults[0].plan.backends, Shape()), self._say)
        self.broken.append(name_of(smallest))
        self._say(
            f"broken by {name_of(smallest)}, {times.fault:g} s, {shape.per_s:g} requests a second: "
            f"python -m tests.chaos --seed {self._seed} --only '{name_of(faults)}'"
        )

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="WORDS", help="experiments with one of these in their names")
    parser.add_argument("--pairs", type=int, default=20, help="number of pairs of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the pairs (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add the results to FILE; what is in it is not repeated"
    )
    parser.add_argument("--minutes", type=float, help="begin no experiment after this time")
    return parser.parse_args()


async def main() -> int:
    options = read_options()
    may = [fault for fault in FAULTS if fault.missing is None]
    experiments: list[Faults] = [(fault,) for fault in may] + list(draw(may, options.pairs, options.seed))
    if options.only:
        experiments = [faults for faults in experiments if any(word in name_of(faults) for word in options.only)]
    for fault in FAULTS:
        if fault.missing is not None:
            print(f"left out: {fault.name} {fault.missing}")
    long = Long(options.seed, options.json, options.minutes)
    await long.run(experiments)
    if not long.is_complete:
        print("not all of them: run it again with the same file")
    print(f"{len(long.broken)} experiments broke an invariant" + "".join(f"\n  {name}" for name in long.broken))
    return bool(long.broken)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
