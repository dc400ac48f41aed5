from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from shards.engine import Engine, EngineOptions
from shards.exec.batch import Batch
from shards.model import Model
from shards.network.errors import BrokenCheckpoint
from shards.nouns import FinishReason, SamplingParams, Submission
from tests.shards.tiny_checkpoints import VOCABULARY, save_checkpoint, some_tokens


def generate(reference: torch.nn.Module, prompt: list[int], new: int) -> list[int]:
    """The greedy answers of transformers."""
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    return reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def answers(engine: Engine, prompts: dict[int, list[int]], new: int) -> dict[int, list[int]]:
    """Greedy answers of all prompts at once, arriving in pieces of 50 tokens."""
    drawn: dict[int, list[int]] = {key: [] for key in prompts}
    for key, prompt in prompts.items():
        engine.submit(Submission(key, len(prompt), new, sampling=SamplingParams(ignore_eos=True)))
    for start in range(0, 400, 50):
        for key, prompt in prompts.items():
            piece = prompt[start : start + 50]
            if piece:
                engine.extend(key, struct.pack(f"<{len(piece)}I", *piece))
        while engine.has_work:
            report = engine.step()
            engine.check()
            assert all(finished.reason is FinishReason.LENGTH for finished in report.finished)
            for answer in report.drawn:
                drawn[answer.key] += answer.token_ids
    return drawn


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_answers_are_those_of_transformers_cold_and_warm(tmp_path: Path, kind: str):
    reference = save_checkpoint(tmp_path, kind)
    engine = Engine(Model.load(tmp_path), EngineOptions(kv_blocks=40, chunk_tokens=64))
    document = some_tokens(150)
    prompts = {key: document[: 150 - key] + some_tokens(random.Random(key).randint(1, 60), key) for key in range(6)}
    expected = {key: generate(reference, prompt, 12) for key, prompt in prompts.items()}
    assert answers(engine, prompts, 12) == expected
    assert answers(engine, prompts, 12) == expected


def test_a_loaded_model_describes_itself(tmp_path: Path):
    save_checkpoint(tmp_path, "llama")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    shares: list[float] = []
    model = Model.load(tmp_path, name="tiny", on_progress=lambda done, total: shares.append(done / total))
    assert (model.name, model.vocabulary, model.dtype, model.path) == ("tiny", VOCABULARY, "float32", tmp_path)
    assert model.network.context_tokens == 512
    assert model.eos_token_ids == {2}
    assert model.tokenizer is not None
    assert shares[-1] == 1
    assert Model.load(tmp_path, dtype="bfloat16").network.block_bytes == model.network.block_bytes / 2


@pytest.mark.parametrize(("stored", "computed"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 4)])
def test_in_int8_the_head_is_quantised_too_and_kv_is_as_the_checkpoint(
    tmp_path: Path, stored: torch.dtype, computed: int
):
    save_checkpoint(tmp_path, "qwen2", dtype=stored)
    model = Model.load(tmp_path, dtype="int8")
    assert model.dtype == "int8"
    assert model.network.block_bytes == 2 * 2 * 2 * 64 * 16 * computed
    assert Model.load(tmp_path, dtype="int8", kv_dtype="int8").network.block_bytes == 2 * 2 * 2 * 64 * (16 + 4)
    [answer] = answers(Engine(model, EngineOptions(kv_blocks=40)), {0: some_tokens(100)}, 8).values()
    assert len(answer) == 8


def test_a_broken_tokenizer_and_an_unknown_dtype_are_named(tmp_path: Path):
    save_checkpoint(tmp_path, "llama")
    with pytest.raises(ValueError, match="must be auto, float32, bfloat16, float16 or int8"):
        Model.load(tmp_path, dtype="int3")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BrokenCheckpoint, match=r"tokenizer\.json cannot be read"):
        Model.load(tmp_path)


def test_a_network_without_memory_says_so(tmp_path: Path):
    save_checkpoint(tmp_path, "llama")
    nothing = torch.empty(0, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="no memory was allocated"):
        Model.load(tmp_path).network.forward(Batch(nothing, nothing, nothing, (), nothing))
