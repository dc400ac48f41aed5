from __future__ import annotations

import pytest
import torch

from shards.kv.cache import Extent, KvCache, bytes_per_block, extents_of
from shards.kv.copier import ThreadCopier
from shards.kv.host_memory import HostMemory
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.pool import BlockPool
from shards.kv.quantised import KV_DTYPES, QuantisedKvCache, kv_dtype_of, make_cache
from shards.kv.table import BlockTable
from shards.network.config import NetworkConfig, Rope

INT8, FP8 = torch.int8, torch.float8_e4m3fn
STORED = [torch.float32, torch.bfloat16, INT8, FP8]


def a_config(layers: int = 3, kv_heads: int = 2, head_dim: int = 16) -> NetworkConfig:
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


def written(cache: KvCache, blocks: tuple[int, ...], tokens: int) -> torch.Tensor:
    """Random KV, its tokens of very different sizes, written to layer 1."""
    slots = torch.cat([torch.arange(block * 64, block * 64 + 64) for block in blocks])[:tokens]
    generator = torch.Generator().manual_seed(7)
    given = torch.randn(tokens, 4, 16, generator=generator) * torch.logspace(-3, 3, tokens)[:, None, None]
    cache.write(1, slots, given)
    return given


@pytest.mark.parametrize(("dtype", "relative"), [(INT8, 0.5 / 127), (FP8, 16 / 448)])
def test_what_is_read_is_what_was_written_within_the_bound_of_the_type(dtype, relative):
    cache = QuantisedKvCache(a_config(), 4, dtype=dtype)
    given = written(cache, (2, 0), 100)
    keys, values = cache.read(1, extents_of((2, 0), 0, 100))
    assert keys.dtype == cache.dtype == torch.float32
    largest = given.abs().amax(-1, keepdim=True)
    for got, wanted, most in zip((keys, values), given.chunk(2, 1), largest.chunk(2, 1), strict=True):
        error = (got.transpose(0, 1) - wanted).abs()
        assert (error <= most * relative * 1.001).all()
        assert error.max() > 0


def test_fp8_keeps_small_numbers_beside_large_ones():
    cache = QuantisedKvCache(a_config(), 1, dtype=FP8)
    given = torch.logspace(-1, 2, 16).repeat(1, 4, 1)
    cache.write(0, torch.tensor([5]), given)
    keys, _ = cache.read(0, (Extent(5, 1),))
    assert ((keys[:, 0] - given[0, :2]).abs() <= given[0, :2] / 16 * 1.001).all()


@pytest.mark.parametrize(("dtype", "bound"), [(INT8, 0.02), (FP8, 0.08)])
def test_attention_over_it_is_close_to_attention_over_float32(dtype, bound):
    config = a_config(head_dim=64)
    plain, quantised = KvCache(config, 8), QuantisedKvCache(config, 8, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(512, 4, 64, generator=generator)
    queries = torch.randn(2, 16, 64, generator=generator)
    mixed = []
    for cache in (plain, quantised):
        cache.write(0, torch.arange(512), given)
        keys, values = cache.read(0, (Extent(0, 512),))
        mixed.append(torch.nn.functional.scaled_dot_product_attention(queries, keys, values))
    error = (mixed[1] - mixed[0]).norm() / mixed[0].norm()
    print(f"{dtype}: relative error of attention {error:.4f}")
    assert 0 < error < bound


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_a_token_is_stored_alike_alone_and_among_others(dtype):
    together, alone = (QuantisedKvCache(a_config(), 1, dtype=dtype) for _ in range(2))
    given = torch.randn(10, 4, 16)
    together.write(0, torch.arange(10), given)
    for token in range(10):
        alone.write(0, torch.tensor([token]), given[token : token + 1])
    for read, alone_read in zip(together.read(0, (Extent(0, 10),)), alone.read(0, (Extent(0, 10),)), strict=True):
        assert torch.equal(read, alone_read)


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_views_are_what_each_layer_reads(dtype):
    cache = QuantisedKvCache(a_config(), 4, dtype=dtype)
    for layer in range(3):
        cache.write(layer, torch.arange(256), torch.randn(256, 4, 16))
    views = cache.views(Extent(70, 90))
    for layer in range(3):
        keys, values = cache.read(layer, (Extent(70, 90),))
        assert torch.equal(views.keys[layer].transpose(1, 2), keys)
        assert torch.equal(views.values[layer], values)


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(dtype):
    cache = QuantisedKvCache(a_config(), 1, dtype=dtype)
    given = torch.zeros(3, 4, 16)
    given[1, 0, 3], given[2, 1, 5] = float("nan"), float("inf")
    cache.write(0, torch.arange(3), given)
    keys, values = cache.read(0, (Extent(0, 3),))
    assert torch.equal(keys[:, 0], torch.zeros(2, 16))
    assert keys[0, 1].isnan().all()
    assert not keys[1, 2].isfinite().any()
    assert torch.equal(values, torch.zeros(2, 3, 16))


@pytest.mark.parametrize("dtype", STORED)
def test_the_size_of_a_block_counts_the_scales(dtype):
    config = a_config(layers=5, kv_heads=3)
    cache = make_cache(config, 7, dtype=dtype, computed=torch.float32)
    assert sum(plane.nbytes for plane in cache.planes) == 7 * bytes_per_block(config, dtype)
    assert HostMemory(cache, 5).nbytes == 5 * bytes_per_block(config, dtype)


def test_a_dtype_is_chosen_by_name():
    dtypes = [kv_dtype_of(name, computed=torch.float32) for name in ("auto", "float32", "int8", "fp8")]
    assert dtypes == [torch.float32, torch.float32, INT8, FP8]
    assert (
        kv_dtype_of("auto", computed=torch.bfloat16)
        == torch.bfloat16
        == kv_dtype_of("bfloat16", computed=torch.bfloat16)
    )
    assert set(KV_DTYPES) == {"auto", "float32", "bfloat16", "float16", "int8", "fp8"}


def test_a_dtype_that_is_unknown_or_cannot_be_mixed_is_refused():
    with pytest.raises(ValueError, match="kv_dtype is int4; it must be one of auto"):
        kv_dtype_of("int4", computed=torch.float32)
    with pytest.raises(ValueError, match="the network computes in float32"):
        kv_dtype_of("bfloat16", computed=torch.float32)
    with pytest.raises(ValueError, match="int8 or float8_e4m3fn"):
        QuantisedKvCache(a_config(), 1, dtype=torch.float32)


def test_reads_come_in_what_the_network_computes_in():
    cache = make_cache(a_config(), 1, dtype=INT8, computed=torch.bfloat16)
    cache.write(0, torch.arange(4), torch.randn(4, 4, 16, dtype=torch.bfloat16))
    assert cache.read(0, (Extent(0, 4),))[0].dtype == torch.bfloat16 == cache.dtype


@pytest.mark.parametrize("dtype", STORED)
def test_a_block_comes_back_from_the_host_bit_by_bit(dtype):
    cache = make_cache(a_config(), 4, dtype=dtype, computed=torch.float32)
    memory = HostMemory(cache, 2)
    for layer in range(3):
        cache.write(layer, torch.arange(256), torch.randn(256, 4, 16).to(cache.dtype))
    before = [plane.clone() for plane in cache.planes]
    memory.save(2, 1)
    memory.load(1, 0)
    for plane, old in zip(cache.planes, before, strict=True):
        assert torch.equal(plane[0].contiguous().view(torch.uint8), old[2].contiguous().view(torch.uint8))
        assert torch.equal(plane[1:].contiguous().view(torch.uint8), old[1:].contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", STORED)
def test_parked_kv_is_the_same_after_others_have_used_its_blocks(dtype):
    cache = make_cache(a_config(), 4, dtype=dtype, computed=torch.float32)
    copier = ThreadCopier(HostMemory(cache, 4))
    pool = BlockPool(4, model="m", copier=copier)
    table = BlockTable(pool, "")
    table.grow(2 * BLOCK_TOKENS + 7)
    for layer in range(3):
        slots = torch.cat([torch.arange(block * 64, block * 64 + 64) for block in table.ids])[:135]
        cache.write(layer, slots, torch.randn(135, 4, 16).to(cache.dtype))
    before = [cache.read(layer, extents_of(table.ids, 0, 135)) for layer in range(3)]
    before = [(keys.clone(), values.clone()) for keys, values in before]
    assert table.park()
    others = pool.take(4)
    for plane in cache.planes:
        plane.fill_(0)
    pool.release(others)
    table.unpark()
    copier.close()
    assert table.is_landed
    for layer, (keys, values) in enumerate(before):
        got_keys, got_values = cache.read(layer, extents_of(table.ids, 0, 135))
        assert torch.equal(got_keys, keys)
        assert torch.equal(got_values, values)
