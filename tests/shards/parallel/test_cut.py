"""A network in parts computes what it computes in one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from shards.kv.cache import KvCache
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.errors import UnsupportedCheckpoint
from shards.network.group import ALONE, Group
from shards.network.loading import load_weights
from shards.parallel.cut import PartBuilder
from shards.parallel.part import Part
from shards.quant.write.checkpoint import write_quantised
from tests.shards.parallel.threads import on_all
from tests.shards.tiny_checkpoints import KINDS, a_batch, save_checkpoint, some_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from shards.network.loading import DtypeChoice

PROMPT = some_tokens(140)


def logits(folder: Path, group: Group, *, dtype: DtypeChoice = "auto") -> Tensor:
    """Logits of the first part: of a prompt in chunks and single tokens, side by side with another."""
    config = read_config(folder)
    part = config if group.size == 1 else Part(group.rank, group.size).config(config)
    build = (lambda builder: builder) if group.size == 1 else partial(PartBuilder.of, group=group)
    decoder = Decoder(part, load_weights(folder, config, dtype=dtype, builder_of=build), group)
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


def test_a_checkpoint_in_fewer_bits_is_refused(tmp_path):
    save_checkpoint(tmp_path / "exact", "qwen3")
    write_quantised(tmp_path / "exact", tmp_path / "int8", "int8")
    with pytest.raises(UnsupportedCheckpoint, match="stored as QuantisedMatrix is not divided among processes"):
        on_all(2, lambda group: logits(tmp_path / "int8", group))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 5, 8, 97])
def test_the_shares_of_all_parts_are_the_whole(size, count):
    parts = [Part(rank, size) for rank in range(size)]
    assert [number for part in parts for number in part.slice(count)] == list(range(count))
    assert [number for part in parts for number in part.vocabulary(count)] == list(range(count))
    assert max(len(part.slice(count)) for part in parts) <= min(len(part.slice(count)) for part in parts) + 1
