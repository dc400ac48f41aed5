"""64 chats beside long prompts on a virtual clock: a budget of time per step against budgets of tokens.

The engine's own scheduler (admission, prefix cache, plan, cost model fitted online) runs against a network that only
takes time: Llama-3.1-8B in bfloat16 on one H200, from its rooflines (weights 3.5 ms a step, 17.7 us per prompt token,
1.17 us per prompt token and 1,000 tokens of context at 450 TFLOP/s of attention, 30.5 ns per token of decode context).
No torch, no GPU. A chat is 1,000 tokens in and 1,000 out, and the next follows at once.

    python benchmarks/scheduler.py
    python benchmarks/scheduler.py --seconds 300 --every 40 --long-tokens 200000
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from shards.exec.request import Request
from shards.exec.sequence import Sequence
from shards.kv.pool import BlockPool
from shards.kv.table import BlockTable
from shards.nouns import Submission
from shards.options import EngineOptions
from shards.sched.cost import CostModel
from shards.scheduler import Scheduler, Step

WEIGHTS_S = 15.0e9 / 4.3e12
TOKEN_S = 17.7e-6
PAIR_S = 1.17e-9
CONTEXT_S = 131072 / 4.3e12
PRIOR = (3e-3, 2e-5, 1e-9, 3e-8)
"""The cost model's prior before its first step: the right order of magnitude, no more."""

BUDGET_S = 0.05
VOCABULARY = 128_256


@dataclass(frozen=True)
class Load:
    chats: int
    chat_tokens: int
    long_tokens: int
    every_s: float
    seconds: float


@dataclass
class Result:
    """Seconds: between two tokens of a chat; to the first token of long prompts, and of chats."""

    name: str
    between: list[float] = field(default_factory=list)
    long_ttft: list[float] = field(default_factory=list)
    chat_ttft: list[float] = field(default_factory=list)
    steps: int = 0
    real_s: float = 0.0


def true_cost_s(step: Step) -> float:
    """The duration of a step without noise. Decoding rows read the weights that the step reads anyway."""
    prefill = sum(piece.tokens for piece in step.pieces if not piece.sequence.is_decoding)
    return WEIGHTS_S + TOKEN_S * prefill + PAIR_S * step.shape.pairs + CONTEXT_S * step.shape.decode_context


class Simulation:
    """A scheduler, its clock and its clients."""

    def __init__(self, options: EngineOptions, load: Load, result: Result) -> None:
        self.load, self.result = load, result
        self.now_s = 0.0
        self._rng, self._arrivals = random.Random(1), 0
        self._pool = BlockPool(14_000, model="simulated")
        self.scheduler = Scheduler(self._pool, options, cost=CostModel(PRIOR))
        self._last_s: dict[int, float] = {}

    def submit(self, tokens: int, new_tokens: int, kind: str, arrived_s: float) -> None:
        """A new prompt of `tokens`."""
        key = (kind, self._arrivals)
        request = Request(Submission(key, tokens, new_tokens), arrived_s=arrived_s)
        request.prompt += np.random.default_rng(self._arrivals).integers(VOCABULARY, size=tokens, dtype="<u4").tobytes()
        self.scheduler.roster.enter(Sequence(request, 0, arrival=self._arrivals, table=BlockTable(self._pool, "")))
        self._arrivals += 1

    def chat(self) -> None:
        """A chat begins or continues. The first ones are spread so that they do not end together."""
        spread = self._rng.uniform(0.2, 1.0) if self._arrivals < self.load.chats else 1.0
        self.submit(self.load.chat_tokens, max(1, int(self.load.chat_tokens * spread)), "chat", self.now_s)

    def run(self) -> None:
        """Run until the clock reaches the end of the load."""
        for _ in range(self.load.chats):
            self.chat()
        next_long_s = 5.0
        while self.now_s < self.load.seconds:
            if self.now_s >= next_long_s:
                self.submit(self.load.long_tokens, 1, "long", next_long_s)
                next_long_s += self.load.every_s
            step = self.scheduler.next_step(self.now_s)
            elapsed_s = true_cost_s(step) * self._rng.uniform(0.98, 1.05)
            self.now_s += elapsed_s
            self.scheduler.observe(step, elapsed_s)
            self.result.steps += 1
            for sequence in list(self._drawn(step)):
                self._note(sequence)

    def _drawn(self, step: Step) -> Iterator[Sequence]:
        for piece in step.pieces:
            self.scheduler.advance(piece)
            self.scheduler.store(piece.sequence)
            if piece.draws:
                yield piece.sequence

    def _note(self, sequence: Sequence) -> None:
        kind, arrival = sequence.request.submission.key  # type: ignore[misc, has-type]
        if sequence.output and self.now_s > 2.0:
            self.result.between.append(self.now_s - self._last_s[arrival])
        elif not sequence.output and self.now_s > 2.0:
            waited = self.result.long_ttft if kind == "long" else self.result.chat_ttft
            waited.append(self.now_s - sequence.request.arrived_s)
        self._last_s[arrival] = self.now_s
        self.scheduler.take(sequence, arrival % VOCABULARY)
        if len(sequence.output) == sequence.request.submission.max_new_tokens:
            self.scheduler.finish(sequence)
            if kind == "chat":
                self.chat()


def simulate(name: str, options: EngineOptions, load: Load) -> Result:
    """The results of `load` on an engine with `options`."""
    result, started_s = Result(name), time.perf_counter()
    Simulation(options, load, result).run()
    result.real_s = time.perf_counter() - started_s
    return result


def row(result: Result) -> dict[str, object]:
    """The table's columns, milliseconds and seconds."""
    between = 1000 * np.array(result.between)
    p50, p99 = np.percentile(between, [50, 99])
    long_s = result.long_ttft
    return {
        "budget": result.name,
        "chat P50 ms": round(float(p50), 1),
        "P99": round(float(p99), 1),
        "max": round(float(between.max()), 1),
        "chat TTFT P99 ms": round(1000 * float(np.percentile(result.chat_ttft, 99))),
        "long TTFT s": " ".join(f"{seconds:.1f}" for seconds in long_s) or "none ended",
        "steps": result.steps,
        "scheduler ms/step": round(1000 * result.real_s / result.steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--chat-tokens", type=int, default=1000)
    parser.add_argument("--long-tokens", type=int, default=131_072)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=90.0, help="virtual")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = Load(arguments.chats, arguments.chat_tokens, arguments.long_tokens, arguments.every, arguments.seconds)
    forever = {"max_running": load.chats + 32, "step_s": 1e6, "lanes": 1}
    policies = {
        "50 ms of time": EngineOptions(max_running=load.chats + 32, step_s=BUDGET_S),
        "8192 tokens": EngineOptions(chunk_tokens=8192, batch_tokens=8192, **forever),  # type: ignore[arg-type]
        "2048 tokens": EngineOptions(chunk_tokens=2048, batch_tokens=2048, **forever),  # type: ignore[arg-type]
    }
    rows = [row(simulate(name, options, load)) for name, options in policies.items()]
    if arguments.json:
        print(json.dumps(rows))
        return
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0]}
    for cells in ({name: name for name in widths}, *rows):
        print("  ".join(str(cells[name]).rjust(width) for name, width in widths.items()))


if __name__ == "__main__":
    main()
