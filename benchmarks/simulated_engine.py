"""The simulated engine against the engine that computes: the same requests, times to first and between tokens.

    python benchmarks/simulated_engine.py [--requests 120] [--load 0.6] [--rounds 3]

The shards' engine with the bundled model runs on a CPU, and its clock is the CPU time of this process, so that other
work on the machine counts less; while it idles the clock jumps. A first round measures the duration of steps; with that
speed the simulated engine runs the requests of other rounds, which the real one runs too. Prompts are 100 to 1,800
tokens, every other one begins like three others; answers have 32.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from shards.bundled import weights
from shards.engine import Engine, EngineOptions
from shards.model import Model
from shards.nouns import SamplingParams, Submission
from shards.sched.cost import StepShape
from shards.threads import use_threads
from shards.warmup import warm_up
from simulation.engine import SimulatedEngine
from simulation.speed import Machine, Speed

ANSWER = 32
KV_TOKENS = 64_000
RUNNING = 16


class Ask(NamedTuple):
    """Its arrival, and its prompt."""

    at_s: float
    tokens: bytes

    @property
    def submission(self) -> Submission:
        sampling = SamplingParams(ignore_eos=True)
        return Submission(self.at_s, len(self.tokens) // 4, ANSWER, sampling=sampling)


class Result(NamedTuple):
    """Seconds to the first token of each request, and mean seconds between its others."""

    ttft: list[float]
    tpot: list[float]


class Clock:
    """CPU time of this process, plus the skipped idle time."""

    def __init__(self) -> None:
        self.jumped_s = -time.process_time()

    def __call__(self) -> float:
        return time.process_time() + self.jumped_s

    def jump_to(self, at_s: float) -> None:
        self.jumped_s += max(0.0, at_s - self())


def story(count: int, per_second: float, seed: int) -> list[Ask]:
    rng, now_s, asks = random.Random(seed), 0.0, []
    documents = [rng.choices(range(50, 400), k=768) for _ in range(4)]
    for number in range(count):
        now_s += rng.expovariate(per_second)
        rest = rng.choices(range(50, 400), k=rng.randrange(100, 1000))
        ids = documents[number // 2 % 4] + rest if number % 2 else rest
        asks.append(Ask(now_s, np.array(ids, dtype="<u4").tobytes()))
    return asks


def result_of(asks: list[Ask], first: dict[object, float], last: dict[object, float]) -> Result:
    ttft = [first[request.at_s] - request.at_s for request in asks]
    return Result(ttft, [(last[request.at_s] - first[request.at_s]) / (ANSWER - 1) for request in asks])


def computed(model: Model, asks: list[Ask]) -> tuple[Result, Speed]:
    """The engine's results, and the speed that it reports."""
    clock, coming = Clock(), list(asks)
    engine = Engine(model, EngineOptions(kv_blocks=KV_TOKENS // 64, max_running=RUNNING), clock=clock)
    warm_up(engine)
    clock.jumped_s = -time.process_time()
    steps: list[tuple[StepShape, float]] = []
    seen: list[StepShape] = []
    observe = engine._scheduler.cost.observe

    def note(shape: StepShape, elapsed_s: float, *, steps: int = 1) -> None:
        seen.append(shape)
        observe(shape, elapsed_s, steps=steps)

    engine._scheduler.cost.observe = note  # type: ignore[method-assign]
    first: dict[object, float] = {}
    last: dict[object, float] = {}
    while coming or engine.has_work:
        if not engine.has_work:
            clock.jump_to(coming[0].at_s)
        while coming and coming[0].at_s <= clock():
            request = coming.pop(0)
            engine.submit(request.submission)
            engine.extend(request.at_s, request.tokens)
        began_s = clock()
        report, now_s = engine.step(), clock()
        if seen:
            steps.append((seen.pop(), now_s - began_s))
        for drawn in report.drawn:
            first.setdefault(drawn.key, now_s)
            last[drawn.key] = now_s
    return result_of(asks, first, last), fitted(steps)


def fitted(steps: list[tuple[StepShape, float]]) -> Speed:
    """Least squares over whole steps, including scheduling and reporting, each weighted by its own duration."""
    features = np.array([(1.0, shape.tokens, shape.pairs, shape.decode_context) for shape, _ in steps])
    seconds = np.array([elapsed_s for _, elapsed_s in steps])
    costs = np.maximum(0.0, np.linalg.lstsq(features / seconds[:, None], np.ones(len(steps)), rcond=None)[0])
    step_s, token_s, pair_s, context_s = map(float, costs)
    return Speed(step_s=step_s, token_s=token_s, pair_s=pair_s, sequence_s=token_s, context_s=context_s)


def simulated(speed: Speed, asks: list[Ask]) -> Result:
    """The simulated engine's results at that speed."""
    machine = Machine(speed, kv_tokens=KV_TOKENS, running=RUNNING)
    engine, now_s, coming = SimulatedEngine(machine, model="bundled"), 0.0, list(asks)
    first: dict[object, float] = {}
    last: dict[object, float] = {}
    while coming or engine.has_requests:
        if engine.ends_s is None and not engine.has_requests:
            now_s = max(now_s, coming[0].at_s)
        while coming and coming[0].at_s <= (now_s if engine.ends_s is None else engine.ends_s):
            request = coming.pop(0)
            engine.submit(request.submission, request.tokens, new_tokens=ANSWER, now_s=max(now_s, request.at_s))
        if engine.ends_s is not None:
            now_s = engine.ends_s
            for drew in engine.end():
                first.setdefault(drew.key, now_s)
                last[drew.key] = now_s
        engine.begin(now_s)
    return result_of(asks, first, last)


def quantiles(seconds: list[float]) -> list[float]:
    return [1000 * float(np.percentile(seconds, share)) for share in (50, 90, 95)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=120)
    options.add_argument("--load", type=float, default=0.4, help="request rate, as a share of the engine's capacity")
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    use_threads(1)
    model = Model.load(weights())
    # all at once: gives the capacity in requests per second
    flood, _ = computed(model, story(40, 1e6, seed=0))
    per_second = chosen.load * 40 / max(flood.ttft)
    _, speed = computed(model, story(chosen.requests, per_second, seed=1))
    print(f"{per_second:.2f} requests a second, {chosen.load:.0%} of what it can do; {speed}")
    print("round            TTFT P50      P90      P95   TPOT P50      P90      P95 (ms)")
    for seed in range(2, 2 + chosen.rounds):
        asks = story(chosen.requests, per_second, seed)
        real, _ = computed(model, asks)
        ours = simulated(speed, asks)
        rows = {
            name: [*quantiles(result.ttft), *quantiles(result.tpot)]
            for name, result in (("real", real), ("simulated", ours))
        }
        for name, row in rows.items():
            print(f"{seed - 1:5}  {name:9}  " + "  ".join(f"{value:7.1f}" for value in row))
        ratios = [after / before for before, after in zip(rows["real"], rows["simulated"], strict=True)]
        print("       ratio      " + "  ".join(f"{value:7.2f}" for value in ratios), flush=True)


if __name__ == "__main__":
    main()
