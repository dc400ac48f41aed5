from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from shards.network.config_file import read_config
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint
from shards.network.heads import HeadProjection
from shards.network.layers import DenseLinear, LayerWeights, Linear
from shards.network.loading import DtypeChoice, gpu_dtype, load_weights, random_weights
from shards.network.mlp import GatedMlp
from shards.quant.int8 import Int8Linear
from tests.shards.quantised_checkpoints import save_mxfp4
from tests.shards.tiny_checkpoints import save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def dense(linear: Linear) -> DenseLinear:
    assert isinstance(linear, DenseLinear)
    return linear


def heads(layer: LayerWeights) -> HeadProjection:
    assert isinstance(layer.attention, HeadProjection)
    return layer.attention


def mlp(layer: LayerWeights) -> GatedMlp:
    assert isinstance(layer.mlp, GatedMlp)
    return layer.mlp


def bias_of(linear: Linear) -> Tensor:
    bias = dense(linear).bias
    assert bias is not None
    return bias


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, "qwen3")
    return tmp_path


def test_what_reads_the_same_input_is_one_matrix(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    layer = load_weights(folder, read_config(folder)).layers[1]
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(dense(heads(layer).query_key_value).weight, torch.cat(parts))
    parts = [tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(dense(mlp(layer).gate_up).weight, torch.cat(parts))


def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "whole", "llama")
    save_checkpoint(tmp_path / "sharded", "llama", shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    config = read_config(tmp_path / "sharded")
    whole, sharded = (load_weights(tmp_path / name, config) for name in ("whole", "sharded"))
    assert torch.equal(dense(whole.head).weight, dense(sharded.head).weight)
    for layer, sharded_layer in zip(whole.layers, sharded.layers, strict=True):
        assert torch.equal(dense(mlp(layer).gate_up).weight, dense(mlp(sharded_layer).gate_up).weight)
        assert torch.equal(bias_of(heads(layer).query_key_value), bias_of(heads(sharded_layer).query_key_value))


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama, tied head")
    weights = load_weights(tmp_path, read_config(tmp_path))
    assert dense(weights.head).weight is weights.embedding


@pytest.mark.parametrize(
    ("stored", "chosen", "found"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float16, "float16", torch.float16),
        (torch.bfloat16, "float16", torch.float16),
    ],
)
def test_the_dtype_is_the_one_chosen(
    tmp_path: Path, stored: torch.dtype, chosen: DtypeChoice, found: torch.dtype
) -> None:
    save_checkpoint(tmp_path, "qwen2", dtype=stored)
    weights = load_weights(tmp_path, read_config(tmp_path), dtype=chosen)
    layer = weights.layers[0]
    tensors = (
        weights.embedding,
        dense(mlp(layer).down).weight,
        bias_of(heads(layer).query_key_value),
        dense(weights.head).weight,
    )
    assert {tensor.dtype for tensor in tensors} == {weights.norm.dtype, weights.dtype} == {found}


@pytest.mark.parametrize(
    ("stored", "chosen", "found"),
    [
        (torch.float32, "auto", "bfloat16"),
        (torch.float16, "auto", "float16"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "bfloat16", "bfloat16"),
    ],
)
def test_a_gpu_keeps_the_type_of_the_file_unless_it_is_slow(
    tmp_path: Path, stored: torch.dtype, chosen: str, found: str
) -> None:
    save_checkpoint(tmp_path, "llama", dtype=stored)
    assert gpu_dtype(tmp_path, chosen) == found


def test_the_names_of_a_network_with_images_are_those_of_its_text_part(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "gemma3, with images")
    stored = load_file(tmp_path / "model.safetensors")
    assert any("vision_tower" in name for name in stored)
    weights = load_weights(tmp_path, read_config(tmp_path))
    assert [name for name in stored if "embed_tokens" in name] != ["model.embed_tokens.weight"]
    assert weights.dtype == torch.float32


def test_gpt_oss_in_mxfp4_is_what_its_numbers_say(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    config = read_config(tmp_path / "meant")
    plain, packed = (load_weights(tmp_path / form, config) for form in ("meant", "quantised"))
    hidden = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    for layer, other in zip(plain.layers, packed.layers, strict=True):
        assert torch.equal(layer.mlp(hidden), other.mlp(hidden))


def test_packed_numbers_of_another_type_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "gpt-oss")
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(4, 192, 2, 16, dtype=torch.int8)}))
    with pytest.raises(UnsupportedCheckpoint, match=f"{name} is stored as I8"):
        load_weights(tmp_path, read_config(tmp_path))


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "deepseek v3")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.ones(2, 2)}))
    load_weights(tmp_path, read_config(tmp_path))


def test_progress_rises_to_the_whole(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(folder, read_config(folder), on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == ((folder / "model.safetensors").stat().st_size,) * 2
    assert len(seen) > 20


NORM = "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"{NORM} is missing"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), "embed_tokens.weight is missing"),
        (lambda tensors: tensors.update({NORM: torch.ones(31)}), rf"{NORM} has shape \(31,\), .* \(32,\)"),
        (lambda tensors: tensors.update({"odd": torch.ones(1), "p": torch.ones(1)}), "odd and 1 more has no place"),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, change: Callable[[dict[str, Tensor]], object], message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(BrokenCheckpoint, match=message):
        load_weights(folder, read_config(folder))


def test_tensors_of_another_precision_are_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(UnsupportedCheckpoint, match=f"{NORM} is stored as I8"):
        load_weights(folder, read_config(folder))


def test_frequencies_that_old_checkpoints_carry_do_not_hurt(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(16)}))
    load_weights(folder, read_config(folder))


def test_a_folder_without_safetensors_is_no_checkpoint(folder: Path) -> None:
    config = read_config(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BrokenCheckpoint, match="holds neither"):
        load_weights(folder, config)


def test_a_file_cut_short_is_named(folder: Path) -> None:
    config, file = read_config(folder), folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BrokenCheckpoint, match=r"model\.safetensors cannot be read"):
        load_weights(folder, config)


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": 3}', "[" * 100_000, '{"weight_map":{"a":1}}'])
def test_an_index_that_is_none_is_named(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BrokenCheckpoint, match="is not an index"):
        load_weights(folder, read_config(folder))


def test_a_shard_that_is_not_there_is_named(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenCheckpoint, match=r"model-00002-of-00002\.safetensors cannot be read"):
        load_weights(folder, read_config(folder))


def test_random_weights_depend_on_the_seed_alone(folder: Path) -> None:
    config = read_config(folder)
    first, again, other = (random_weights(config, seed) for seed in (1, 1, 2))
    drawn, again_drawn, other_drawn = (dense(mlp(weights.layers[1]).down).weight for weights in (first, again, other))
    assert torch.equal(drawn, again_drawn)
    assert not torch.equal(drawn, other_drawn)


@pytest.mark.parametrize("kind", ["llama", "llama, tied head", "qwen3"])
def test_int8_keeps_the_embedding_and_the_norms_and_quantises_every_matrix(tmp_path: Path, kind: str) -> None:
    save_checkpoint(tmp_path, kind, dtype=torch.bfloat16)
    config = read_config(tmp_path)
    weights, exact = load_weights(tmp_path, config, dtype="int8"), load_weights(tmp_path, config)
    assert torch.equal(weights.embedding, exact.embedding)
    hidden = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    pairs = [(weights.head, exact.head)]
    for layer, exact_layer in zip(weights.layers, exact.layers, strict=True):
        assert layer.mlp_norm is not None
        assert exact_layer.mlp_norm is not None
        assert torch.equal(layer.mlp_norm, exact_layer.mlp_norm.float())
        pairs += [
            (heads(layer).query_key_value, heads(exact_layer).query_key_value),
            (mlp(layer).gate_up, mlp(exact_layer).gate_up),
        ]
    for quantised, linear in pairs:
        assert isinstance(quantised, Int8Linear)
        wanted = linear(hidden.bfloat16()).float()
        assert (quantised(hidden) - wanted).norm() / wanted.norm() < 0.02
