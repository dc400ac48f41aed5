"""Requests of one engine, as they come and go, and what becomes of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shards.engine import Engine
from shards.nouns import Finished, FinishReason, SamplingParams, Submission, TokenLogprobs
from tests.models.truth import Truth

GREEDY = SamplingParams()


@dataclass(frozen=True)
class Ask:
    """A request: when it comes (in steps), in how many pieces its prompt arrives, and when its client leaves."""

    prompt: Sequence[int]
    new: int
    sampling: SamplingParams = GREEDY
    choices: int = 1
    rank: int = 0
    answered: int = 0
    adapter: str = ""
    at_step: int = 0
    pieces: int = 1
    leaves_at: int | None = None


@dataclass
class Outcome:
    """The tokens of each choice, their log-probabilities, and how it ended."""

    drawn: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, Finished] = field(default_factory=dict)


def answers(engine: Engine, asks: dict[Hashable, Ask], *, most_steps: int = 5000) -> dict[Hashable, Outcome]:
    """What the engine makes of all `asks`; it is checked after each step. Raises AssertionError if it does not end."""
    outcomes = {key: Outcome() for key in asks}
    left: dict[Hashable, list[bytes]] = {}
    for step in range(most_steps):
        for key, ask in asks.items():
            if ask.at_step == step:
                sampling, known = ask.sampling, {"rank": ask.rank, "choices": ask.choices, "adapter": ask.adapter}
                known |= {"answered_tokens": ask.answered}
                engine.submit(Submission(key, len(ask.prompt), ask.new, sampling=sampling, **known))  # type: ignore[arg-type]
                left[key] = [piece.tobytes() for piece in np.array_split(np.array(ask.prompt, "<u4"), ask.pieces)]
            if ask.leaves_at == step and len(outcomes[key].ends) < ask.choices:
                engine.cancel(key)
                left.pop(key, None)
        for key in list(left):
            engine.extend(key, left[key].pop(0))
            if not left[key]:
                del left[key]
        report = engine.step()
        if not (report.drawn or report.finished or report.progress):
            # a thread loads an adapter, or copies KV
            time.sleep(0.001)
        engine.check()
        for drawn in report.drawn:
            outcomes[drawn.key].drawn[drawn.choice] += drawn.token_ids
            outcomes[drawn.key].logprobs[drawn.choice] += drawn.logprobs
        for end in report.finished:
            assert end.choice not in outcomes[end.key].ends, f"choice {end.choice} of {end.key!r} ended twice"
            outcomes[end.key].ends[end.choice] = end
        if all(len(outcomes[key].ends) == ask.choices for key, ask in asks.items()):
            load = engine.step().load
            assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total)
            return outcomes
    raise AssertionError(f"still at work after {most_steps} steps: {engine!r}")


def objections(truth: Truth, asks: dict[Hashable, Ask], outcomes: dict[Hashable, Outcome]) -> list[str]:
    """Each difference of the answers from what transformers says, beyond rounding, with the request's key."""
    found = []
    for key, ask in asks.items():
        for choice, end in outcomes[key].ends.items():
            drawn, told = outcomes[key].drawn[choice], outcomes[key].logprobs[choice]
            here = truth.objections(ask.prompt, drawn, ask.sampling, told, answered=ask.answered)
            if end.reason is FinishReason.CANCELLED and ask.leaves_at is not None:
                here += [f"{len(drawn)} tokens of {ask.new}"] if len(drawn) > ask.new else []
            else:
                here += truth.objections_to_end(drawn, end, ask.sampling, ask.new, answered=ask.answered)
            found += [f"{key!r}, choice {choice}: {one}" for one in here]
    return found
