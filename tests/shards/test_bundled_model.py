"""The bundled checkpoint on our engine says exactly what it says on `transformers`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shards.bundled import weights
from shards.bundled.documents import document, facts_within, prompt
from shards.engine import Engine, EngineOptions
from shards.model import Model
from shards.nouns import SamplingParams, Submission

transformers = pytest.importorskip("transformers")

PROMPTS = 6
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Questions about documents of 100 to 1,800 tokens, through the chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights())
    rng = random.Random(11)
    ids = []
    for number in range(PROMPTS):
        paper = document(rng, facts_within(100 + number * 340))
        messages = [{"role": "user", "content": prompt(paper.text, rng.choice(paper.questions).question)}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """The greedy answers of transformers, each prompt by itself."""
    network = transformers.AutoModelForCausalLM.from_pretrained(weights(), dtype=torch.float32).eval()
    answers = []
    for ids in prompts:
        with torch.inference_mode():
            out = network.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        answers.append(out[0, len(ids) :].tolist())
    return answers


def answers_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy answers of the engine, all prompts at once."""
    for key, ids in enumerate(prompts):
        engine.submit(Submission(key, len(ids), NEW_TOKENS, sampling=SamplingParams(temperature=0.0)))
        engine.extend(key, np.asarray(ids, dtype="<u4").tobytes())
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for drawn in engine.step().drawn:
            assert isinstance(drawn.key, int)
            answers[drawn.key] += drawn.token_ids
        engine.check()
    return answers


@pytest.mark.parametrize("chunk_tokens", [64, 8192])
def test_greedy_text_is_that_of_transformers_cold_and_from_cache(
    prompts: list[list[int]], expected: list[list[int]], chunk_tokens: int
) -> None:
    engine = Engine(Model.load(weights()), EngineOptions(kv_blocks=256, chunk_tokens=chunk_tokens))
    assert answers_of(engine, prompts) == expected
    assert answers_of(engine, prompts) == expected
