"""SmolLM2 in fewer bits beside itself: how much each form changes what the model says."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.engine import Engine, EngineOptions
from shards.gguf.folder import folder_of as folder_of_gguf
from shards.model import Model
from shards.nouns import SamplingParams
from shards.quant.write.checkpoint import write_quantised
from tests.models.asked import Ask, answers
from tests.models.real import QUESTIONS, chat
from tests.models.truth import Truth

FORMS = {
    # what is computed, and how far a log-probability of the likeliest tokens may be from transformers' in float32
    "bfloat16": 0.4,
    "int8": 0.6,
    "kv int8": 0.2,
    "gguf": 0.4,
    "written as int8": 0.8,
}


def loaded(form: str, folder: Path, made: Path) -> Model:
    if form == "bfloat16":
        return Model.load(folder)
    if form == "int8":
        return Model.load(folder, dtype="int8")
    if form == "kv int8":
        return Model.load(folder, dtype="float32", kv_dtype="int8")
    if form == "gguf":
        return Model.load(folder_of_gguf(folder.with_suffix(".gguf")))
    write_quantised(folder, made / "int8", "int8")
    return Model.load(made / "int8")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_says_nearly_what_the_weights_say(
    form: str, smollm2: Path, truth: Truth, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asks: dict[Hashable, Ask] = {
        at: Ask(chat(tokenizer, question), 8, SamplingParams(top_logprobs=1)) for at, question in enumerate(QUESTIONS)
    }
    with closing(Engine(loaded(form, smollm2, tmp_path), EngineOptions(kv_blocks=64))) as engine:
        outcomes = answers(engine, asks)
    away = []
    for key, ask in asks.items():
        drawn, told = outcomes[key].drawn[0], outcomes[key].logprobs[0]
        scores = truth.logits([*ask.prompt, *drawn[:-1]], len(drawn)).log_softmax(1)
        away += [abs(each.logprob - float(row[token])) for each, row, token in zip(told, scores, drawn, strict=True)]
    assert torch.tensor(away).mean() < FORMS[form] / 4
    assert torch.tensor(away).quantile(0.9) < FORMS[form]
