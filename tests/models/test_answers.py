"""SmolLM2 in our engine and in transformers, with the same weights in float32: tokens, log-probabilities and ends."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.engine import Engine, EngineOptions
from shards.lora.options import AdapterOptions
from shards.model import Model
from shards.nouns import FinishReason, SamplingParams
from tests.models.asked import Ask, Outcome, answers, objections
from tests.models.real import QUESTIONS, chat, page, truth_of
from tests.models.truth import Truth
from tests.shards.lora.adapters import save_adapter

NEW = 12
TOLD = SamplingParams(top_logprobs=3)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> dict[Hashable, list[int]]:
    """Questions, a second turn, a long page, and a text that its answer repeats."""
    found: dict[Hashable, list[int]] = {at: chat(tokenizer, question) for at, question in enumerate(QUESTIONS[:4])}
    found["second turn"] = chat(tokenizer, QUESTIONS[0], "The capital of France is Paris.", "And of Italy?")
    found["long"] = chat(tokenizer, f"{page(1, 900)}\n\nWhat is this text about?")
    found["repeats"] = chat(tokenizer, "Repeat: one two three four one two three four one two three four")
    return found


def asked(prompts: dict[Hashable, list[int]], **more: Any) -> dict[Hashable, Ask]:
    return {key: Ask(prompt, NEW, TOLD, **more) for key, prompt in prompts.items()}


WAYS: dict[str, EngineOptions] = {
    "all at once": EngineOptions(kv_blocks=64),
    "long prompts in chunks": EngineOptions(kv_blocks=64, chunk_tokens=64, batch_tokens=128, lanes=1),
    "without guesses": EngineOptions(kv_blocks=64, speculate="off", run_ahead="off"),
    "each apart": EngineOptions(kv_blocks=64, deterministic=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_that_of_transformers(
    way: str, model: Model, truth: Truth, prompts: dict[Hashable, list[int]]
) -> None:
    with closing(Engine(model, WAYS[way])) as engine:
        asks = asked(prompts)
        assert objections(truth, asks, answers(engine, asks)) == []


def test_a_cached_prompt_and_a_next_turn_give_what_transformers_gives(
    model: Model, truth: Truth, prompts: dict[Hashable, list[int]], tokenizer: Any
) -> None:
    first: dict[Hashable, Ask] = {"long": Ask(prompts["long"], NEW, TOLD)}
    with closing(Engine(model, EngineOptions(kv_blocks=64))) as engine:
        before = answers(engine, first)["long"].drawn[0]
        turn = [*prompts["long"], *before, *tokenizer.encode("<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n")]
        asks: dict[Hashable, Ask] = {"again": first["long"], "turn": Ask(turn, NEW, TOLD)}
        outcomes = answers(engine, asks)
    assert all(outcomes[key].ends[0].cached_tokens >= 128 for key in asks)
    assert outcomes["again"].drawn[0] == before
    assert objections(truth, asks, outcomes) == []


@pytest.mark.parametrize("begun", [1, 7])
def test_an_answer_that_another_shard_had_begun_ends_as_if_it_had_stayed_there(
    begun: int, model: Model, truth: Truth, prompts: dict[Hashable, list[int]]
) -> None:
    dials = [{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}]
    ways = [SamplingParams(top_logprobs=2, **each) for each in dials]  # type: ignore[arg-type]
    asks: dict[Hashable, Ask] = {at: Ask(prompts[1], NEW, way) for at, way in enumerate(ways)}
    with closing(Engine(model, EngineOptions(kv_blocks=64))) as engine:
        whole = answers(engine, asks)
    rest: dict[Hashable, Ask] = {
        at: Ask([*prompts[1], *whole[at].drawn[0][:begun]], NEW - begun, way, answered=begun)
        for at, way in enumerate(ways)
    }
    with closing(Engine(model, EngineOptions(kv_blocks=64))) as engine:
        outcomes = answers(engine, rest)
    assert [outcomes[at].drawn[0] for at in rest] == [whole[at].drawn[0][begun:] for at in rest]
    assert objections(truth, asks, whole) + objections(truth, rest, outcomes) == []


def test_the_end_of_an_answer_is_the_models_own(model: Model, truth: Truth, tokenizer: Any) -> None:
    asks: dict[Hashable, Ask] = {"short": Ask(chat(tokenizer, QUESTIONS[0]), 40, TOLD)}
    with closing(Engine(model, EngineOptions(kv_blocks=64))) as engine:
        outcomes: dict[Hashable, Outcome] = answers(engine, asks)
    assert objections(truth, asks, outcomes) == []
    assert outcomes["short"].ends[0].reason is FinishReason.STOP
    assert "Paris" in tokenizer.decode(outcomes["short"].drawn[0])


def test_a_preempted_answer_goes_on_as_transformers_would(
    model: Model, truth: Truth, prompts: dict[Hashable, list[int]]
) -> None:
    # one runs at a time, and each one that comes later is better
    options = EngineOptions(kv_blocks=40, max_running=1, host_bytes=2**26, preempt_cooldown_s=0.0)
    asks: dict[Hashable, Ask] = {
        key: Ask(prompts[key], NEW, TOLD, rank=9 - at, at_step=5 * at) for at, key in enumerate(list(prompts)[:4])
    }
    with closing(Engine(model, options)) as engine:
        outcomes = answers(engine, asks)
    assert objections(truth, asks, outcomes) == []


def test_an_adapter_answers_as_peft_computes_it(
    smollm2: Path, tmp_path: Path, prompts: dict[Hashable, list[int]]
) -> None:
    truth = truth_of(smollm2)
    truth.model = save_adapter(truth.model, tmp_path / "a")
    options = EngineOptions(kv_blocks=64, adapters=AdapterOptions({"a": tmp_path / "a"}))
    asks: dict[Hashable, Ask] = {key: Ask(prompts[key], 8, TOLD, adapter="a") for key in (0, "long")}
    with closing(Engine(Model.load(smollm2, dtype="float32"), options)) as engine:
        outcomes = answers(engine, asks)
    assert objections(truth, asks, outcomes) == []
    with torch.inference_mode(), truth.model.disable_adapter():
        own = truth.model(torch.tensor([prompts[0]])).logits[0, -1]
    assert (truth.logits([*prompts[0], *outcomes[0].drawn[0][:-1]], 8)[0] - own).abs().max() > 1
