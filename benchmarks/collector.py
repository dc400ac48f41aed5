"""Pauses of the garbage collector in a shard that serves many requests, with and without `shards/collector.py`.

    python benchmarks/collector.py

The bundled model on one CPU thread; the engine takes steps as in a shard, with all imports of one. Each way runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Mapping

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Pauses:
    """Seconds of each collection, by generation."""

    def __init__(self) -> None:
        self.by_generation: dict[int, list[float]] = {0: [], 1: [], 2: []}
        self._started = 0.0
        gc.callbacks.append(self._hear)

    def _hear(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self.by_generation[info["generation"]].append(time.perf_counter() - self._started)


def serve(requests: int, *, spared: bool) -> None:
    """Answer `requests` requests, 32 at a time, and print the pauses."""
    import numpy as np

    # all that a shard imports
    import shards.announce
    import shards.server  # noqa: F401
    from shards.bundled import weights
    from shards.collector import spare_what_stays
    from shards.engine import Engine, EngineOptions
    from shards.model import Model
    from shards.nouns import SamplingParams, Submission
    from shards.threads import use_threads
    from shards.warmup import warm_up

    use_threads(1)
    engine = Engine(Model.load(weights()), EngineOptions(kv_bytes=2**28, max_running=32))
    warm_up(engine)
    if spared:
        spare_what_stays()
    pauses, rng = Pauses(), np.random.default_rng(0)
    sent = done = 0
    longest = 0.0
    while done < requests:
        while sent < requests and sent - done < 32:
            ids = rng.integers(3, 200, 40).astype("<u4")
            engine.submit(Submission(sent, len(ids), 16, sampling=SamplingParams(ignore_eos=True)))
            engine.extend(sent, ids.tobytes())
            sent += 1
        started = time.perf_counter()
        done += len(engine.step().finished)
        longest = max(longest, time.perf_counter() - started)
    engine.close()
    full = pauses.by_generation[2]
    every = [pause for found in pauses.by_generation.values() for pause in found]
    print(f"{'spared' if spared else 'usual'}: {requests} requests, {len(every)} collections, {len(full)} of them full")
    print(f"  longest {max(every, default=0.0) * 1e3:.1f} ms, all together {sum(every) * 1e3:.0f} ms")
    print(f"  longest step {longest * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--way", choices=("usual", "spared"))
    arguments = parser.parse_args()
    if arguments.way:
        serve(arguments.requests, spared=arguments.way == "spared")
        return
    for way in ("usual", "spared"):
        subprocess.run([sys.executable, __file__, "--way", way, "--requests", str(arguments.requests)], check=True)


if __name__ == "__main__":
    main()
