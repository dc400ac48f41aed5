"""The engine serves networks of other families as it serves Llama: cached prefixes and host memory change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shards.engine import Engine, EngineOptions
from shards.model import Model
from shards.nouns import SamplingParams, Submission
from tests.shards.tiny_checkpoints import save_checkpoint, some_tokens

NEW_TOKENS = 6


def answered(engine: Engine, key: str, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of a greedy answer, and how many of the prompt's were cached."""
    engine.submit(Submission(key, len(prompt), NEW_TOKENS, sampling=SamplingParams(ignore_eos=True, temperature=0.0)))
    engine.extend(key, torch.tensor(prompt, dtype=torch.int32).numpy().tobytes())
    drawn, cached = list[int](), 0
    while engine.has_work:
        report = engine.step()
        drawn += [token for each in report.drawn for token in each.token_ids]
        cached += sum(finished.cached_tokens for finished in report.finished)
        engine.check()
    return drawn, cached


def expected(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["qwen3 moe", "gemma3", "gpt-oss", "deepseek v3", "glm4"])
def test_an_answer_is_that_of_transformers_with_a_cached_prefix_and_from_host_memory(tmp_path: Path, kind: str) -> None:
    theirs = save_checkpoint(tmp_path, kind)
    model = Model.load(tmp_path)
    # one prompt fits at a time, so that the other one's blocks go to host memory and come back
    engine = Engine(model, EngineOptions(kv_blocks=4, host_bytes=16 * model.network.block_bytes))
    first, second = some_tokens(150), some_tokens(150, seed=1)
    wanted = expected(theirs, first)
    assert answered(engine, "a", first) == (wanted, 0)
    assert answered(engine, "b", first) == (wanted, 128)
    assert answered(engine, "c", second) == (expected(theirs, second), 0)
    assert answered(engine, "d", first) == (wanted, 128)
    engine.close()
