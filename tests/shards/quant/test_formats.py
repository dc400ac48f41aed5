"""Published formats, against transformers with the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shards.kv.cache import KvCache
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.errors import BrokenCheckpoint, CheckpointError, UnsupportedCheckpoint
from shards.network.layers import Weights
from shards.network.loading import load_weights
from shards.quant.formats.table import METHODS, format_of
from tests.shards.quantised_checkpoints import SCHEMES, save_quantised
from tests.shards.tiny_checkpoints import a_batch, some_tokens

TOKENS = some_tokens(70)


def expected_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "meant", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def logits_of(folder: Path, weights: Weights) -> Tensor:
    config = read_config(folder / "quantised")
    cache = KvCache(config, 4, dtype=weights.embedding.dtype)
    return Decoder(config, weights).forward(a_batch((TOKENS, 0, (2, 1))), cache).float()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_numbers_that_a_file_stands_for(tmp_path: Path, scheme: str) -> None:
    save_quantised(tmp_path, "qwen3", scheme)
    expected = expected_logits(tmp_path)
    stored = tmp_path / "quantised"
    as_stored = load_weights(stored, read_config(stored), dtype="float32", is_for_gpu=True)
    torch.testing.assert_close(logits_of(tmp_path, as_stored), expected, atol=1e-4, rtol=0)
    for dtype, most in (("bfloat16", 0.1), ("int8", 0.15)):
        on_cpu = load_weights(stored, read_config(stored), dtype=dtype)  # type: ignore[arg-type]
        assert (logits_of(tmp_path, on_cpu) - expected).abs().mean() < most


@pytest.mark.parametrize("kind", ["qwen3 moe", "mixtral", "deepseek v3", "glm4", "phi3", "gemma3"])
@pytest.mark.parametrize("scheme", ["fp8, blocks", "gptq, by activation, with zeros"])
def test_experts_latent_attention_and_reordered_rows_are_read_too(tmp_path: Path, kind: str, scheme: str) -> None:
    save_quantised(tmp_path, kind, scheme)
    stored = tmp_path / "quantised"
    weights = load_weights(stored, read_config(stored), dtype="float32")
    torch.testing.assert_close(logits_of(tmp_path, weights), expected_logits(tmp_path), atol=2e-4, rtol=0)


def test_a_checkpoint_in_float16_is_computed_in_bfloat16_which_cpus_multiply_with_four_bits(tmp_path: Path) -> None:
    save_quantised(tmp_path, "llama", "awq", dtype=torch.float16)
    stored = tmp_path / "quantised"
    assert load_weights(stored, read_config(stored)).dtype == torch.bfloat16
    assert load_weights(stored, read_config(stored), dtype="float16", is_for_gpu=True).dtype == torch.float16


COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}},
}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": COMPRESSED["config_groups"]["a"]["weights"] | weights}
    return COMPRESSED | {"config_groups": {"a": group}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quantized \(bitsandbytes\); a shard reads floating point, fp8, .*gptq"),
        ({}, r"quantized \(unknown\)"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with numbers in e5m2"),
        ({"quant_method": "awq", "bits": 8}, "awq with 8 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "awq with version gemv"),
        ({"quant_method": "awq", "group_size": 33}, "awq with groups of 33"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "gptq with marlin's packing"),
        ({"quant_method": "gptq", "checkpoint_format": "bitblas"}, "gptq with bitblas"),
        ({"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 8}}}, "other bits or groups in some layers"),
        ({"quant_method": "gptq", "group_size": 0}, "gptq with groups of 0"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "with format nvfp4-pack-quantized"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, "transforms of activations"),
        (compressed(num_bits=2), "type int in 2 bits"),
        (compressed(strategy="tensor_group"), "strategy tensor_group"),
        (compressed(group_size=None), "groups of None"),
        (compressed(type="float", num_bits=8), "pack-quantized of float"),
    ],
)
def test_what_is_not_supported_of_a_format_is_named_with_a_hint(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message) as caught:
        format_of(config)
    assert "another engine" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": "four"}, "quantization_config: Expected `int`"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"blocks of \[0, 128\]"),
        ({"quant_method": "compressed-tensors"}, "missing required field `config_groups`"),
        (compressed(strategy="block") | {"format": "float-quantized"}, "needs a block_structure"),
        (COMPRESSED | {"config_groups": {"a": {"targets": ["re:("], "weights": {}}}, "format": "int-quantized"}, "unt"),
    ],
)
def test_a_broken_configuration_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenCheckpoint, match=message):
        format_of(config)


def test_each_method_has_a_reader() -> None:
    assert set(METHODS) == {"fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq"}


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        ("fp8, blocks", {f"{DOWN}.weight_scale_inv": None}, f"{DOWN}.weight is stored as F8_E4M3 and config.json"),
        ("fp8, blocks", {f"{DOWN}.weight_scale_inv": torch.ones(2, 3)}, "has shape"),
        ("fp8, per tensor", {f"{DOWN}.weight_scale": torch.ones(3)}, "one for each of 64 rows"),
        ("fp8, per tensor", {f"{DOWN}.weight": torch.ones(64, 96)}, "stored as F32, not F8_E4M3"),
        ("gptq", {f"{DOWN}.g_idx": torch.zeros(96, dtype=torch.int32)}, "not in groups of 32"),
        ("awq", {f"{DOWN}.scales": torch.ones(2, 64)}, "has shape"),
        ("compressed-tensors, int4 W4A16", {f"{DOWN}.weight_shape": torch.tensor([64, 95])}, "weight_shape is"),
        (
            "compressed-tensors, int4 W4A16 by activation",
            {f"{DOWN}.weight_g_idx": torch.zeros(96, dtype=torch.int32)},
            "not in groups",
        ),
        ("compressed-tensors, int8 W8A8", {f"{DOWN}.unknown": torch.ones(1)}, "has no place in this network"),
    ],
)
def test_tensors_that_do_not_fit_the_format_are_named(
    tmp_path: Path, scheme: str, changes: dict[str, Tensor | None], message: str
) -> None:
    save_quantised(tmp_path, "qwen3", scheme)
    file = tmp_path / "quantised" / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**load_file(file)} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(CheckpointError, match=message):
        load_weights(file.parent, read_config(file.parent))


def test_a_group_that_names_matrices_comes_before_one_for_all(tmp_path: Path) -> None:
    save_quantised(tmp_path, "qwen3", "compressed-tensors, int8 W8A8")
    path = tmp_path / "quantised" / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    own = json.loads(json.dumps(groups["group_0"])) | {"targets": ["re:.*down_proj$"], "input_activations": None}
    groups["group_1"] = own
    path.write_text(json.dumps(config))
    taken = format_of(config["quantization_config"])
    weights = load_weights(path.parent, read_config(path.parent), dtype="float32", is_for_gpu=True)
    torch.testing.assert_close(logits_of(tmp_path, weights), expected_logits(tmp_path), atol=1e-4, rtol=0)
    rounding = {name: taken.schemes[0].matches(name) for name in (DOWN, "model.layers.0.mlp.up_proj")}  # type: ignore[attr-defined]
    assert rounding == {DOWN: True, "model.layers.0.mlp.up_proj": False}
    groups.pop("group_0")
    path.write_text(json.dumps(config))
    with pytest.raises(BrokenCheckpoint, match="no group of config_groups names it"):
        load_weights(path.parent, read_config(path.parent))
