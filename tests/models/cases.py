"""Cases drawn by a seed: an engine, and requests that come, wait, are preempted and leave, with all parameters."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

from shards.engine import EngineOptions
from shards.nouns import SamplingParams
from tests.models.asked import Ask, Outcome

Prompts: TypeAlias = Callable[[random.Random], list[int]]
"""Draws a prompt; some begin alike."""


class Case(NamedTuple):
    """An engine's options, and requests."""

    options: EngineOptions
    asks: dict[Hashable, Ask]


def a_case(seed: int, prompts: Prompts, *, texts: tuple[str, ...] = (), context: int = 512, vocabulary: int) -> Case:
    """The case of this seed. `texts` are stop strings; prompts and answers fit into `context`."""
    rng = random.Random(seed)
    options = EngineOptions(
        kv_blocks=rng.choice([10, 16, 64]),
        max_running=rng.choice([1, 3, 16]),
        lanes=rng.choice([1, 8]),
        chunk_tokens=rng.choice([64, 128, 8192]),
        batch_tokens=rng.choice([128, 16384]),
        host_bytes=rng.choice([0, 2**26]),
        preempt_cooldown_s=0.0,
        run_ahead=rng.choice(["auto", "off"]),
        speculate=rng.choice(["auto", "off"]),
        window_kv=rng.choice(["auto", "all"]),
        deterministic=rng.random() < 0.15,
    )
    asks: dict[Hashable, Ask] = {}
    for number in range(rng.randint(2, 7)):
        prompt = prompts(rng)[: context - 70]
        at_step = rng.choice([0, 0, rng.randint(1, 30)])
        new = rng.choice([1, 2, 17, 40, 64])
        asks[number] = Ask(
            prompt,
            new,
            some_sampling(rng, new, texts, vocabulary),
            choices=rng.choice([1, 1, 1, 3]),
            rank=rng.randint(0, 3),
            at_step=at_step,
            pieces=rng.choice([1, 1, 3, 10]),
            leaves_at=at_step + rng.randint(0, 40) if rng.random() < 0.15 else None,
        )
    return Case(options, asks)


def some_sampling(rng: random.Random, new: int, texts: tuple[str, ...], vocabulary: int) -> SamplingParams:
    """Half of the time greedy, with few other parameters at once."""
    changes: dict[str, Any] = {"ignore_eos": rng.random() < 0.3}
    if rng.random() < 0.5:
        changes |= {"temperature": rng.choice([0.3, 0.8, 1.0, 1.7]), "seed": rng.randrange(2**32)}
        for name, values in (("top_k", [1, 5, 40]), ("top_p", [0.1, 0.9]), ("min_p", [0.05, 0.5])):
            if rng.random() < 0.3:
                changes[name] = rng.choice(values)
    for name, values in (
        ("repetition_penalty", [0.8, 1.2, 2.0]),
        ("presence_penalty", [-1.0, 1.5]),
        ("frequency_penalty", [-0.5, 0.7]),
        ("min_new_tokens", [each for each in (1, 5, 40) if each <= new]),
        ("top_logprobs", [0, 1, 5, 20]),
    ):
        if rng.random() < 0.25:
            changes[name] = rng.choice(values)
    if rng.random() < 0.25:
        changes["logit_bias"] = {rng.randrange(vocabulary): rng.choice([-100.0, -2.0, 5.0]) for _ in range(3)}
    if rng.random() < 0.25:
        changes["stop_token_ids"] = frozenset(rng.randrange(vocabulary) for _ in range(vocabulary // 50))
    if texts and rng.random() < 0.4:
        changes["stop"] = tuple(rng.sample(texts, rng.randint(1, 2)))
    return SamplingParams(**changes)


def next_turns(
    seed: int, asks: dict[Hashable, Ask], outcomes: dict[Hashable, Outcome], prompts: Prompts, *, context: int
) -> dict[Hashable, Ask]:
    """Requests that go on where those before ended: the next turn, and answers that another engine had begun."""
    rng = random.Random(f"{seed} again")
    found: dict[Hashable, Ask] = {}
    for key, ask in asks.items():
        drawn = outcomes[key].drawn[0]
        if ask.leaves_at is not None or not drawn:
            continue
        turn = [*ask.prompt, *drawn, *prompts(rng)[:60]]
        if len(turn) + 20 < context:
            found["turn", key] = Ask(turn, 20, SamplingParams(top_logprobs=1, ignore_eos=True), rank=rng.randint(0, 3))
        if ask.choices == 1 and ask.sampling.grammar is None and len(drawn) > 2 and not ask.sampling.stop:
            begun = rng.randint(1, len(drawn) - 1)
            found["rest", key] = Ask(
                [*ask.prompt, *drawn[:begun]], ask.new - begun, ask.sampling, answered=begun, rank=rng.randint(0, 3)
            )
    return found
