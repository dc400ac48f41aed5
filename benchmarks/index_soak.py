"""A day of cache events in the prefix index: memory must stay constant.

`--backends` send 100 events a second each for `--hours` of simulated time, as fast as they can be processed: stores of
one to eight blocks that continue a prompt or begin one (half of them with a shared beginning), and evictions of blocks
without room, oldest prompt first, leaf first. Now and then a backend restarts, each tenth time under a new name.
In between, prompts are looked up and touched, as decisions do. The index is far too small for all held blocks, so that
it is full for most of the day. Python's garbage collector has the settings of a router: on, with its own thresholds.

One row for each 24th of the time: memory of the process (without a collection before the sample), the size that the
index reports, the mean of all calls and the slowest one, and the work of the collector. Times are processor times.

    python benchmarks/index_soak.py                                   # 864 million events: hours
    python benchmarks/index_soak.py --backends 2 --bytes 1000000      # a whole day of two: some minutes
    python benchmarks/index_soak.py --hours 0.5
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from policies.prefix.index import PrefixIndex

EVENTS_PER_S = 100
ROOM_BLOCKS = 20_000
ROWS = 24
PAGE = 4096
COLUMNS = {
    "hours": 7,
    "events": 12,
    "resident MiB": 12,
    "index MiB": 9,
    "blocks": 10,
    "sets": 7,
    "us/event": 9,
    "slowest ms": 10,
    "us/decision": 11,
    "collections": 12,
    "longest ms": 10,
}


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


@dataclass(slots=True)
class Pauses:
    """Counts Python's garbage collections, and their longest pause. Register it with `gc`."""

    collections: int = 0
    longest_s: float = 0.0
    started: float = 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self.started = time.process_time()
        else:
            self.collections += 1
            self.longest_s = max(self.longest_s, time.process_time() - self.started)


@dataclass(slots=True)
class Meter:
    """Times of calls since the last row."""

    calls: int = 0
    spent_s: float = 0.0
    slowest_s: float = 0.0

    def __call__(self, call: Callable[[], object]) -> None:
        started = time.process_time()
        call()
        took = time.process_time() - started
        self.calls, self.spent_s, self.slowest_s = self.calls + 1, self.spent_s + took, max(self.slowest_s, took)


@dataclass(slots=True)
class Engine:
    """One backend's cache: prompts as arrays of keys, oldest first. Everything that it keeps is bounded."""

    name: str
    prompts: deque[array[int]] = field(default_factory=deque)
    held: int = 0
    lives: int = 0


class Fleet:
    """Engines that send their events to `index`."""

    def __init__(self, index: PrefixIndex, backends: int, seed: int) -> None:
        self.index, self.events = index, Meter()
        self.look_ups = Meter()
        self._rng = random.Random(seed)
        self._engines = [Engine(f"b{number}") for number in range(backends)]
        self._popular = [self._keys(64) for _ in range(200)]

    def step(self) -> None:
        """One store, the evictions that it causes, and each hundredth time a decision."""
        rng = self._rng
        engine = rng.choice(self._engines)
        if rng.random() < 1e-4:
            self._restart(engine)
        if not engine.prompts or rng.random() < 0.1:
            fresh = array("Q", rng.choice(self._popular)) if rng.random() < 0.5 else self._keys(1)
            engine.prompts.append(array("Q", fresh))
        else:
            fresh = self._keys(rng.randrange(1, 9))
            engine.prompts[-1].extend(fresh)
        engine.held += len(fresh)
        self.events(lambda: self.index.store(engine.name, fresh))
        while engine.held > ROOM_BLOCKS:
            self._evict(engine)
        if rng.random() < 0.01:
            prompt = rng.choice(self._popular) + (engine.prompts[-1] if rng.random() < 0.5 else self._keys(100))
            self.look_ups(lambda: self.index.longest(prompt))
            self.look_ups(lambda: self.index.touch(prompt))

    def _evict(self, engine: Engine) -> None:
        oldest = engine.prompts[0]
        gone = oldest[-8:]
        del oldest[-8:]
        if not oldest:
            engine.prompts.popleft()
        engine.held -= len(gone)
        self.events(lambda: self.index.evict(engine.name, gone[::-1]))

    def _restart(self, engine: Engine) -> None:
        engine.prompts.clear()
        engine.held, engine.lives = 0, engine.lives + 1
        if engine.lives % 10:
            self.events(lambda: self.index.clear(engine.name))
        else:
            self.events(lambda: self.index.forget(engine.name))
            engine.name = f"{engine.name.partition('-')[0]}-{engine.lives}"

    def _keys(self, blocks: int) -> array[int]:
        return array("Q", [self._rng.getrandbits(64) for _ in range(blocks)])


def soak(backends: int, hours: float, max_bytes: int, seed: int) -> None:
    index = PrefixIndex(max_bytes=max_bytes)
    fleet, pauses, total = Fleet(index, backends, seed), Pauses(), round(hours * 3600 * EVENTS_PER_S * backends)
    gc.callbacks.append(pauses)
    size = f"an index of {max_bytes / 2**20:.0f} MiB"
    print(f"{total:,} events, {hours:g} h of {backends} backends; {size}; {gc.get_threshold()=}")
    print(" ".join(f"{title:>{width}}" for title, width in COLUMNS.items()))
    sent, resident = 0, list[float]()
    for row in range(1, ROWS + 1):
        while sent + fleet.events.calls < total * row // ROWS:
            fleet.step()
        events, asked = fleet.events, fleet.look_ups
        fleet.events, fleet.look_ups = Meter(), Meter()
        sent += events.calls
        resident.append(resident_mib())
        values = (
            f"{sent / (3600 * EVENTS_PER_S * backends):.3f}",
            f"{sent:,}",
            f"{resident[-1]:.1f}",
            f"{index.size_bytes() / 2**20:.1f}",
            f"{len(index):,}",
            f"{len(index._sets):,}",
            f"{1e6 * events.spent_s / events.calls:.1f}",
            f"{1e3 * events.slowest_s:.1f}",
            f"{2e6 * asked.spent_s / max(1, asked.calls):.1f}",
            f"{pauses.collections:,}",
            f"{1e3 * pauses.longest_s:.1f}",
        )
        print(" ".join(f"{value:>{width}}" for value, width in zip(values, COLUMNS.values(), strict=True)), flush=True)
    index.check()
    half = resident[ROWS // 2 :]
    grown = f"{half[-1] - half[0]:+.1f} from its first row to its last"
    print(f"the second half: {min(half):.1f} to {max(half):.1f} MiB resident, {grown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", type=int, default=100)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--bytes", type=int, default=32 * 2**20)
    parser.add_argument("--seed", type=int, default=3)
    asked = parser.parse_args()
    soak(asked.backends, asked.hours, asked.bytes, asked.seed)


if __name__ == "__main__":
    main()
