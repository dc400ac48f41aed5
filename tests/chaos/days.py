"""Minutes of random faults: `python -m tests.chaos.days --seed 1 --minutes 10`. Needs root and Linux."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from pathlib import Path

from tests.chaos.day.day import PLAN, Day
from tests.chaos.day.timeline import TROUBLES
from tests.chaos.system import a_system


async def main() -> int:
    """Run, and print the result; 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.days", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults and of the load (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of faults (default: %(default)s)")
    parser.add_argument("--only", nargs="*", metavar="WORD", help="only faults with one of these in their names")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy all logs to FOLDER")
    chosen = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    async with a_system(PLAN) as system:
        words = chosen.only or [""]
        troubles = tuple(each for each in TROUBLES if any(word in each.name for word in words))
        day = Day(system, chosen.seed, chosen.minutes, say, troubles)
        objections = await day.day()
        print(day.summary)
        if chosen.keep:
            chosen.keep.mkdir(parents=True, exist_ok=True)
            for log in (*system.folder.glob("*.log"), *system.disk.iterdir()):
                shutil.copy(log, chosen.keep)
        print(*(f"VIOLATION {each}" for each in objections), sep="\n")
        print(f"seed {chosen.seed}: {len(objections)} violations")
        return bool(objections)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
