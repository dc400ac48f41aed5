from __future__ import annotations

import random

import pytest
import torch

from shards.kv.cache import Extent, KvCache, bytes_per_block, extents_of
from shards.network.config import NetworkConfig, Rope


def a_config(layers: int = 3, kv_heads: int = 2, head_dim: int = 8) -> NetworkConfig:
    return NetworkConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=16,
        intermediate_size=16,
        heads=4,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=1024,
        rms_norm_eps=1e-6,
        rope=Rope(),
        windows=(None,) * layers,
    )


@pytest.mark.parametrize(
    ("blocks", "start", "stop", "extents"),
    [
        ((5,), 0, 1, [(320, 1)]),
        ((5, 6, 7), 0, 192, [(320, 192)]),
        ((5, 6, 7), 70, 130, [(390, 60)]),
        ((5, 9), 0, 128, [(320, 64), (576, 64)]),
        ((9, 5, 6), 10, 150, [(586, 54), (320, 86)]),
        ((6, 5), 0, 65, [(384, 64), (320, 1)]),
        ((1, 2, 9, 3), 64, 128, [(128, 64)]),
        ((5,), 3, 3, []),
    ],
)
def test_consecutive_blocks_are_one_extent(
    blocks: tuple[int, ...], start: int, stop: int, extents: list[tuple[int, int]]
) -> None:
    assert extents_of(blocks, start, stop) == tuple(Extent(*extent) for extent in extents)


@pytest.mark.parametrize("seed", range(100))
def test_extents_cover_each_position_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [block for start in rng.sample(range(0, 60, 4), 4) for block in range(start, start + rng.randint(1, 4))]
    stop = rng.randint(1, 64 * len(blocks))
    start = rng.randrange(stop)
    covered = [slot + at for slot, tokens in extents_of(blocks, start, stop) for at in range(tokens)]
    assert covered == [blocks[position // 64] * 64 + position % 64 for position in range(start, stop)]


def test_what_was_written_is_read_in_order_of_position() -> None:
    cache = KvCache(a_config(), 4)
    cache.data.fill_(float("nan"))
    written = torch.randn(100, 4, 8)
    slots = torch.cat((torch.arange(128, 192), torch.arange(0, 36)))
    cache.write(1, slots, written)
    keys, values = cache.read(1, extents_of((2, 0), 0, 100))
    assert torch.equal(keys, written[:, :2].transpose(0, 1))
    assert torch.equal(values, written[:, 2:].transpose(0, 1))
    assert cache.data[0].isnan().all()
    assert cache.data[2].isnan().all()


def test_one_extent_is_read_without_copying() -> None:
    cache = KvCache(a_config(), 4)
    keys, values = cache.read(1, (Extent(64, 100),))
    assert keys.data_ptr() == cache.data[1, 0, 0, 64].data_ptr()
    assert values.data_ptr() == cache.data[1, 1, 0, 64].data_ptr()


def test_views_of_all_layers_are_what_each_layer_reads() -> None:
    cache = KvCache(a_config(), 4)
    cache.data.normal_()
    views = cache.views(Extent(70, 90))
    for layer in range(3):
        keys, values = cache.read(layer, (Extent(70, 90),))
        assert torch.equal(views.keys[layer].transpose(1, 2), keys)
        assert torch.equal(views.values[layer], values)
        assert views.values[layer].data_ptr() == values.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_a_block_is_what_the_cache_takes(dtype: torch.dtype) -> None:
    config = a_config(layers=5, kv_heads=3)
    assert KvCache(config, 7, dtype=dtype).data.nbytes == 7 * bytes_per_block(config, dtype)


def test_the_representation_has_the_size() -> None:
    assert "4 blocks" in repr(KvCache(a_config(), 4))
