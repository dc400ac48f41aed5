"""The conversation between `benchmarks/engines_cpu.py` and one engine: a line asks for a measurement, a line answers.

No import from outside the standard library, because every engine has an environment of its own.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Protocol

Prompts = list[list[int]]


class Engine(Protocol):
    """An engine that computes prompts and draws greedily, in this process."""

    def start(self, prompts: Prompts) -> None:
        """Compute these prompts and draw the first token of each."""
        ...

    def draw(self, tokens: int) -> None:
        """Draw `tokens` more tokens for each."""
        ...

    def end(self) -> None:
        """Forget all sequences and what was computed for them."""
        ...


def some_prompts(count: int, tokens: int, vocabulary: int, seed: int) -> Prompts:
    """Random prompts; no two seeds begin alike."""
    rng = random.Random(seed)
    return [[rng.randrange(2, vocabulary) for _ in range(tokens)] for _ in range(count)]


def timed(work: Callable[[], None]) -> dict[str, float]:
    """Seconds on the clock and of this process's CPUs that `work` took."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu}


def serve(engine: Engine) -> None:
    """Answer measurements until the input ends: `{"rows", "context", "tokens", "vocabulary", "seed"}`.

    With `tokens` 0 the prompts are timed, else the tokens drawn after them.
    """
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        tokens = wanted["tokens"]
        prompts = some_prompts(wanted["rows"], wanted["context"], wanted["vocabulary"], wanted["seed"])
        if tokens:
            engine.start(prompts)
            engine.draw(2)
            taken = timed(lambda: engine.draw(tokens))  # noqa: B023 - called at once
        else:
            taken = timed(lambda: engine.start(prompts))  # noqa: B023
        engine.end()
        print(json.dumps(taken), flush=True)
