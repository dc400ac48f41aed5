"""Each config.json that users change by hand or other programs write, read as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.kv.cache import KvCache
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.families.table import FAMILIES, MODEL_TYPES
from shards.network.loading import load_weights
from tests.shards.tiny_checkpoints import KINDS, a_batch, save_checkpoint, some_tokens

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"type": "linear", "factor": 2.0}
_SCALED = (
    "llama",
    "mistral, window",
    "ministral, window in some layers",
    "qwen2",
    "qwen3",
    "qwen3 moe",
    "olmo2",
    "gemma3",
)


def _changed(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = {name: value for name, value in (json.loads(path.read_text()) | changes).items() if value != "leave out"}
    path.write_text(json.dumps(config))


def _assert_same(folder: Path) -> None:
    import transformers

    tokens = some_tokens(140)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    config = read_config(folder)
    ours = Decoder(config, load_weights(folder, config)).forward(a_batch((tokens, 0, (4, 5, 6))), KvCache(config, 8))
    assert (ours - expected).abs().max().item() < 1e-4


@pytest.mark.parametrize("scaling", [_YARN, _YARN | {"rope_theta": 77_777.0}, _LINEAR], ids=str)
@pytest.mark.parametrize("kind", _SCALED)
def test_rope_scaling_that_a_user_adds_counts_beside_rope_parameters(
    tmp_path: Path, kind: str, scaling: dict[str, Any]
) -> None:
    save_checkpoint(tmp_path, kind)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    _changed(tmp_path, {"rope_scaling": scaling})
    _assert_same(tmp_path)


@pytest.mark.parametrize("kept", [None, {"rope_type": "default", "rope_theta": 5e5}])
def test_a_base_that_rope_scaling_hides_is_said(
    tmp_path: Path, kept: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, "qwen3")
    _changed(tmp_path, {"rope_scaling": _YARN, "rope_parameters": kept})
    assert read_config(tmp_path).rope.theta == 10_000.0
    assert ("in place of 500000" in caplog.text) == (kept is not None)


def test_the_base_of_a_mixtral_is_a_million_where_the_file_names_none(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "mixtral")
    _changed(tmp_path, {"rope_parameters": "leave out"})
    _assert_same(tmp_path)
    assert read_config(tmp_path).rope.theta == 1e6


@pytest.mark.parametrize("scaling", [None, {}])
def test_rope_scaling_that_is_empty_changes_nothing(tmp_path: Path, scaling: object) -> None:
    save_checkpoint(tmp_path, "llama, llama3 rope")
    before = read_config(tmp_path)
    _changed(tmp_path, {"rope_scaling": scaling})
    assert read_config(tmp_path) == before


@pytest.mark.parametrize(
    "kinds",
    [
        ["sliding_attention", "full_attention"],
        ["full_attention", "sliding_attention"],
        ["full_attention", "full_attention"],
        None,
    ],
)
@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "leave out"])
def test_layers_of_a_mistral_have_the_windows_that_the_file_names(
    tmp_path: Path, kinds: list[str] | None, architecture: str
) -> None:
    save_checkpoint(tmp_path, "mistral, window")
    named = architecture if architecture == "leave out" else [architecture]
    _changed(tmp_path, {"layer_types": kinds, "architectures": named})
    _assert_same(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architectures", ["leave out", None, []])
def test_a_checkpoint_that_names_no_architecture_is_found_by_its_model_type(
    tmp_path: Path, kind: str, architectures: object
) -> None:
    save_checkpoint(tmp_path, kind)
    before = read_config(tmp_path)
    _changed(tmp_path, {"architectures": architectures})
    assert read_config(tmp_path) == before


def test_model_types_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    for model_type, architecture in MODEL_TYPES.items():
        named = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        assert architecture in [names.get(model_type) for names in named]
    assert set(MODEL_TYPES.values()) == {name for family in FAMILIES for name in family.architectures}
