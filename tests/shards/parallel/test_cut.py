"""A network in parts computes what it computes in one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shards.kv.cache import KvCache
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint
from shards.network.group import ALONE, Group
from shards.network.loading import load_weights
from shards.parallel.cut import PartBuilder
from shards.parallel.part import Part
from tests.shards.parallel.lone import part_weights
from tests.shards.parallel.threads import on_all
from tests.shards.quantised_checkpoints import SCHEMES, save_mxfp4, save_quantised
from tests.shards.tiny_checkpoints import KINDS, a_batch, save_checkpoint, some_tokens

if TYPE_CHECKING:
    from pathlib import Path


PROMPT = some_tokens(140)


def logits(folder: Path, group: Group, *, whole_experts: bool = True, **options: Any) -> Tensor:
    """Logits of the first part: of a prompt in chunks and single tokens, side by side with another."""
    config = read_config(folder)
    part = config if group.size == 1 else Part(group.rank, group.size).config(config)
    share = Part(group.rank, group.size, whole_experts)
    build = (lambda builder: builder) if group.size == 1 else partial(PartBuilder.of, group=group, part=share)
    decoder = Decoder(part, load_weights(folder, config, builder_of=build, **options), group)
    cache = KvCache(part, 8, dtype=decoder.weights.dtype)
    blocks, others = [5, 1, 3], [0, 2, 4]
    found = [
        decoder.forward(a_batch((PROMPT[:70], 0, blocks), (PROMPT[60:130], 0, others)), cache),
        decoder.forward(a_batch((PROMPT[70:130], 70, blocks)), cache),
        decoder.forward(a_batch((PROMPT[130:131], 130, blocks), (PROMPT[130:131], 70, others)), cache),
        decoder.forward(a_batch((PROMPT[131:138], 131, blocks), wanted=[2, 6]), cache),
    ]
    # nothing is wanted: the last part of the network is left out, in all processes
    assert not len(decoder.forward(a_batch((PROMPT[138:139], 138, blocks), wanted=[]), cache))
    found.append(decoder.forward(a_batch((PROMPT[139:], 139, blocks)), cache))
    return torch.cat(found) if group.rank == 0 else torch.empty(0)


@pytest.mark.parametrize("kind", KINDS)
def test_two_parts_of_every_family_give_the_logits_of_one_process(kind, tmp_path):
    save_checkpoint(tmp_path, kind)
    alone = logits(tmp_path, ALONE)
    together = on_all(2, lambda group: logits(tmp_path, group))[0]
    assert alone.std() > 0.5
    torch.testing.assert_close(together, alone, atol=2e-4, rtol=0)


def test_four_parts_share_two_kv_heads_and_a_vocabulary_of_97(tmp_path):
    save_checkpoint(tmp_path, "llama")
    alone = logits(tmp_path, ALONE)
    assert read_config(tmp_path).kv_heads == 2
    assert alone.shape[1] == 97
    torch.testing.assert_close(on_all(4, lambda group: logits(tmp_path, group))[0], alone, atol=2e-4, rtol=0)


def test_three_parts_take_unequal_shares_of_mlps_and_experts(tmp_path, monkeypatch):
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 66, "head_dim": 16}
    changed = KINDS["qwen3 moe"][1] | shape | {"intermediate_size": 97, "num_experts": 7}
    monkeypatch.setitem(KINDS, "three", ("Qwen3Moe", changed))
    save_checkpoint(tmp_path, "three")
    alone = logits(tmp_path, ALONE)
    torch.testing.assert_close(on_all(3, lambda group: logits(tmp_path, group))[0], alone, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "mean"), [("bfloat16", 0.06), ("int8", 0.12)])
def test_parts_in_fewer_bits_differ_by_rounding(dtype, mean, tmp_path):
    save_checkpoint(tmp_path, "qwen3")
    alone = logits(tmp_path, ALONE)
    together = on_all(2, lambda group: logits(tmp_path, group, dtype=dtype))[0]
    assert 0 < (together - alone).abs().mean() < mean


def test_heads_that_cannot_be_divided_are_refused_with_the_sizes_that_can(tmp_path):
    save_checkpoint(tmp_path, "llama")
    with pytest.raises(UnsupportedCheckpoint, match="4 attention heads with 2 KV heads") as refused:
        Part(0, 3).require(read_config(tmp_path))
    assert "1, 2, 4" in str(refused.value)


MIXTURES = ["qwen3 moe", "mixtral", "gpt-oss", "glm4 moe", "deepseek v3"]


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_slice_of_each_expert_gives_the_same_logits_as_some_experts_whole(kind, tmp_path):
    save_checkpoint(tmp_path, kind)
    alone = logits(tmp_path, ALONE)
    divided = on_all(2, lambda group: logits(tmp_path, group, whole_experts=False))[0]
    torch.testing.assert_close(divided, alone, atol=2e-4, rtol=0)


REORDERED = "gptq, by activation, with zeros"


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "by activation" not in name])
def test_matrices_in_fewer_bits_are_divided_as_they_are_stored(scheme, tmp_path):
    save_quantised(tmp_path, "qwen3", scheme)
    stored = tmp_path / "quantised"
    alone = logits(stored, ALONE, dtype="float32", is_for_gpu=True)
    together = on_all(2, lambda group: logits(stored, group, dtype="float32", is_for_gpu=True))[0]
    torch.testing.assert_close(together, alone, atol=2e-4, rtol=0)


@pytest.mark.parametrize("whole_experts", [True, False], ids=["whole", "divided"])
@pytest.mark.parametrize("scheme", ["fp8, blocks", "awq", "compressed-tensors, int8 W8A8"])
@pytest.mark.parametrize("kind", ["qwen3 moe", "mixtral"])
def test_experts_in_fewer_bits_are_divided_too(kind, scheme, whole_experts, tmp_path):
    save_quantised(tmp_path, kind, scheme)
    stored, options = tmp_path / "quantised", {"dtype": "float32", "is_for_gpu": True}
    alone = logits(stored, ALONE, **options)
    together = on_all(2, lambda group: logits(stored, group, whole_experts=whole_experts, **options))[0]
    torch.testing.assert_close(together, alone, atol=2e-4, rtol=0)


@pytest.mark.parametrize("whole_experts", [True, False], ids=["whole", "divided"])
def test_experts_in_mxfp4_are_divided_too(whole_experts, tmp_path):
    save_mxfp4(tmp_path)
    alone = logits(tmp_path / "quantised", ALONE)
    together = on_all(2, lambda group: logits(tmp_path / "quantised", group, whole_experts=whole_experts))[0]
    torch.testing.assert_close(together, alone, atol=2e-4, rtol=0)


def test_quantised_parts_for_a_cpu_differ_by_rounding(tmp_path):
    save_quantised(tmp_path, "qwen3 moe", "awq")
    alone = logits(tmp_path / "meant", ALONE)
    for dtype, mean in (("bfloat16", 0.06), ("int8", 0.12)):
        together = on_all(2, lambda group, dtype=dtype: logits(tmp_path / "quantised", group, dtype=dtype))[0]
        assert 0 < (together - alone).abs().mean() < mean


def test_columns_that_were_reordered_by_activation_are_refused(tmp_path):
    save_quantised(tmp_path, "qwen3", REORDERED)
    with pytest.raises(UnsupportedCheckpoint, match=r"not divided among processes: columns .* reordered by activation"):
        on_all(2, lambda group: logits(tmp_path / "quantised", group))


def test_a_part_reads_its_own_experts_alone(tmp_path):
    save_checkpoint(tmp_path, "qwen3 moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    broken = [name for name in tensors if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) >= 4]
    assert broken
    # the first part computes experts 0 to 3
    save_file(tensors | {name: torch.ones(1) for name in broken}, file)
    seen: list[tuple[int, int]] = []
    part_weights(tmp_path, Part(0, 2), on_progress=lambda *progress: seen.append(progress))
    assert seen == sorted(seen)
    with pytest.raises(BrokenCheckpoint, match=r"experts\.4\.gate_proj\.weight has shape \(1,\)"):
        part_weights(tmp_path, Part(1, 2))


def test_experts_that_share_a_tensor_are_read_in_part(tmp_path):
    save_mxfp4(tmp_path)
    for form in ("meant", "quantised"):
        file = tmp_path / form / "model.safetensors"
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if ".mlp.experts." in name and tensor.is_floating_point():
                # experts 0 and 1 are those of the first part
                tensor[2:] = torch.nan
        save_file(tensors, file)
        for layer in part_weights(tmp_path / form, Part(0, 2)).layers:
            assert len(layer.mlp.experts) == 2
            for expert in layer.mlp.experts:
                for linear in (expert.gate_up, expert.down):
                    assert linear.weight.isfinite().all()
                    assert linear.bias.isfinite().all()


def test_fewer_experts_than_parts_are_refused_unless_each_is_divided(tmp_path):
    save_checkpoint(tmp_path, "mixtral")
    config = replace(read_config(tmp_path), heads=8, kv_heads=8)
    with pytest.raises(UnsupportedCheckpoint, match="4 experts are too few for 8 processes") as refused:
        Part(0, 8).require(config)
    assert "set --experts to divided" in str(refused.value)
    Part(0, 8, whole_experts=False).require(config)


def test_experts_of_a_network_without_any_cannot_be_divided(tmp_path):
    save_checkpoint(tmp_path, "qwen3")
    with pytest.raises(UnsupportedCheckpoint, match="Qwen3ForCausalLM has no experts") as refused:
        Part(0, 2, whole_experts=False).require(read_config(tmp_path))
    assert "leave out --experts" in str(refused.value)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 5, 8, 97])
def test_the_shares_of_all_parts_are_the_whole(size, count):
    parts = [Part(rank, size) for rank in range(size)]
    assert [number for part in parts for number in part.slice(count)] == list(range(count))
    assert [number for part in parts for number in part.vocabulary(count)] == list(range(count))
    assert max(len(part.slice(count)) for part in parts) <= min(len(part.slice(count)) for part in parts) + 1
    grouped = [part.slice(count, group=4) for part in parts]
    assert [number for own in grouped for number in own] == list(range(count))


def test_many_groups_stay_whole_and_few_are_cut():
    # 231 groups of 128, as in Qwen2.5-72B, and 6 as in one expert of Qwen3-30B-A3B
    assert {len(Part(rank, 8).slice(29568, group=128)) for rank in range(8)} == {28 * 128, 29 * 128}
    assert {len(Part(rank, 4).slice(768, group=128)) for rank in range(4)} == {192}
