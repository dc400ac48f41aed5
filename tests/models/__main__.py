"""Draw cases, answer them with our engine, and compare each token, log-probability and end with transformers.

    python -m tests.models --seconds 3600

usage: python -m tests.models [--seconds N | --cases N] [--seed N] [--of NAME ...]

Models are random checkpoints of all families (tests/shards/tiny_checkpoints.py), and SmolLM2 where `make models` has
fetched it. A difference that rounding does not explain is printed with its seed; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shards.engine import Engine
from shards.model import Model
from tests.models.asked import answers, objections
from tests.models.cases import Prompts, a_case, next_turns
from tests.models.real import QUESTIONS, SMOLLM2, chat, folder_of, page, truth_of
from tests.models.truth import Truth
from tests.shards.tiny_checkpoints import KINDS, save_checkpoint, some_tokens

STOPS = (". ", "\n\n", " the", "e", "?", "and", " of the")


@dataclass
class World:
    """A model, twice, and prompts for it."""

    name: str
    model: Model
    truth: Truth
    prompts: Prompts
    texts: tuple[str, ...] = ()
    context: int = 512

    def faults(self, seed: int) -> list[str]:
        """What is wrong with the answers of the case of this seed, in two rounds on one engine."""
        vocabulary = self.model.vocabulary
        case = a_case(seed, self.prompts, texts=self.texts, context=self.context, vocabulary=vocabulary)
        with closing(Engine(self.model, case.options, rng=random.Random(seed))) as engine:
            first = answers(engine, case.asks)
            more = next_turns(seed, case.asks, first, self.prompts, context=self.context)
            found = objections(self.truth, case.asks, first)
            if more:
                second = answers(engine, more)
                found += objections(self.truth, more, second)
                for (what, key), ask in more.items():  # type: ignore[misc]
                    whole, rest = first[key].drawn[0], second[what, key].drawn[0]
                    if what == "rest" and ask.sampling.seed is not None and whole[ask.answered :] != rest:
                        found.append(f"{key!r} goes on otherwise behind {ask.answered} tokens: {whole} and {rest}")
        return found


def a_random_world(kind: str, folder: Path) -> World:
    """A tiny checkpoint of this kind, and prompts of random tokens, some of which begin alike or repeat themselves."""
    model = save_checkpoint(folder, kind)
    truth = Truth(model, rounding=0.005, eos=frozenset({2}))

    def prompts(rng: random.Random) -> list[int]:
        shared = some_tokens(400, seed=rng.randint(0, 2))[: rng.choice([0, 64, 200, 400])]
        own = some_tokens(rng.randint(1, 90), seed=rng.randrange(2**20))
        return shared + own * rng.choice([1, 1, 3])

    return World(kind, Model.load(folder), truth, prompts)


def a_real_world(folder: Path) -> World:
    """SmolLM2: questions, turns, pages and code in one of two documents' places."""
    truth = truth_of(folder)

    def prompts(rng: random.Random) -> list[int]:
        about = page(rng.randint(0, 3), rng.choice([0, 0, 800, 2500]))
        turns = [rng.choice(QUESTIONS) for _ in range(rng.choice([1, 1, 3]))]
        return chat(truth.tokenizer, about + turns[0], *turns[1:])

    return World(folder.name, Model.load(folder, dtype="float32"), truth, prompts, STOPS, 1200)


def worlds(names: list[str], folder: Path) -> Iterator[World]:
    """A world after the other, for ever; random ones take little time."""
    real = folder_of(SMOLLM2)
    kinds: list[Any] = [*KINDS, *([real] if real else [])]
    kinds = [kind for kind in kinds if not names or getattr(kind, "name", kind) in names]
    if not kinds:
        sys.exit(f"there is none of {', '.join(names)} here")
    made: World | None = None
    while True:
        for number, kind in enumerate(kinds):
            if made is None or len(kinds) > 1:
                made = a_real_world(kind) if isinstance(kind, Path) else a_random_world(kind, folder / str(number))
            yield made


def main() -> int:
    """1 if there was a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long to search")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="how many cases to try")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--each", type=int, default=5, help="cases of one model after the other")
    parser.add_argument("--of", nargs="*", default=[], help="only these models")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    until, seed, wrong, tokens, ties, largest = time.monotonic() + asked.seconds, asked.seed, 0, 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds(asked.of, Path(folder)):
            judged, close = world.truth.judged, world.truth.ties
            for _ in range(asked.each):
                if seed - asked.seed >= asked.cases or time.monotonic() > until:
                    break
                try:
                    found = world.faults(seed)
                except Exception as error:  # a crash is what is looked for
                    found = [f"{type(error).__name__}: {error}"]
                for line in found:
                    print(f"{world.name}, --seed {seed}: {line}", flush=True)
                seed, wrong = seed + 1, wrong + bool(found)
            tokens, ties = tokens + world.truth.judged - judged, ties + world.truth.ties - close
            largest = max(largest, world.truth.largest)
            if seed - asked.seed >= asked.cases or time.monotonic() > until:
                break
    print(
        f"{seed - asked.seed} cases, {tokens} tokens: {wrong} cases differ; {ties} tokens were another one's tie, "
        f"log-probabilities differ by {largest:.5f} at most"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
