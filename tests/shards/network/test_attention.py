from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shards.exec.batch import Batch
from shards.kv.cache import KvCache
from shards.kv.keys import BLOCK_TOKENS
from shards.network.attention import PagedAttention, attention_reference
from shards.network.config import NetworkConfig, Rope
from tests.shards.tiny_checkpoints import a_batch, some_tokens

# one step of bfloat16 between 4 and 8 is 2**-5: some processors round their sums otherwise
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}

# (new tokens, tokens computed before) of each row; the last rows are long enough to be computed in two parts
ROWS = ((1, 0), (1, 63), (1, 64), (1, 200), (2, 0), (3, 61), (65, 0), (17, 130), (300, 5), (270, 300), (500, 0))


def a_config(heads: int = 6, kv_heads: int = 2, head_dim: int = 20, window: int | None = None) -> NetworkConfig:
    return NetworkConfig(
        architecture="LlamaForCausalLM",
        vocab_size=97,
        hidden_size=heads * head_dim,
        intermediate_size=8,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=1024,
        rms_norm_eps=1e-6,
        rope=Rope(),
        windows=(window, window),
    )


def scattered_blocks(needed: int, free: list[int]) -> tuple[int, ...]:
    """The first half side by side, the rest in any order, as a pool after some use gives them."""
    taken = [free.pop() for _ in range(needed)]
    half = needed // 2
    return (*sorted(taken[:half]), *reversed(taken[half:]))


def a_step(
    config: NetworkConfig, dtype: torch.dtype, rows: tuple[tuple[int, int], ...], *, layer: int
) -> tuple[Batch, KvCache, torch.Tensor, torch.Tensor]:
    """A batch, the cache that holds its contexts and NaN elsewhere, its queries, and its new keys and values."""
    generator = torch.Generator().manual_seed(len(rows))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    free = torch.randperm(80, generator=generator).tolist()
    held = [scattered_blocks(-(-(new + before) // BLOCK_TOKENS), free) for new, before in rows]
    cache = KvCache(config, 80, dtype=dtype)
    cache.data.fill_(float("nan"))
    heads = 2 * config.kv_heads
    for (_, before), blocks in zip(rows, held, strict=True):
        if before:
            past = a_batch((some_tokens(before), 0, blocks))
            cache.write(layer, past.slots, random(before, heads, config.head_dim))
    batch = a_batch(*((some_tokens(new), before, blocks) for (new, before), blocks in zip(rows, held, strict=True)))
    keys_values = random(len(batch.token_ids), heads, config.head_dim)
    cache.write(layer, batch.slots, keys_values)
    return batch, cache, random(len(batch.token_ids), config.heads, config.head_dim), keys_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 40, 64, 290, 2000])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 20), (3, 3, 64), (5, 1, 8), (6, 2, 128)])
def test_fast_and_reference_agree(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    config = a_config(heads, kv_heads, head_dim, window)
    batch, cache, queries, keys_values = a_step(config, dtype, ROWS, layer=1)
    expected = attention_reference(queries, batch, cache=cache, layer=1, window=window)
    fast = PagedAttention(batch, cache, window).attend(1, queries, keys_values)
    assert not expected.isnan().any()
    assert (fast - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40, 290])
@pytest.mark.parametrize("head_dim", [20, 128])
def test_sinks_and_another_scale_take_their_share(head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    config = a_config(head_dim=head_dim, window=window)
    batch, cache, queries, keys_values = a_step(config, dtype, ROWS, layer=1)
    sinks = torch.randn(config.heads, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = attention_reference(queries, batch, cache=cache, layer=1, window=window, scale=0.4, sinks=sinks)
    fast = PagedAttention(batch, cache, window, scale=0.4).attend(1, queries, keys_values, sinks=sinks)
    assert not expected.isnan().any()
    assert (fast - expected).abs().max() < TOLERANCE[dtype]


def test_a_row_alone_gets_the_very_bits_it_gets_among_others() -> None:
    config = a_config()
    batch, cache, queries, keys_values = a_step(config, torch.float32, ROWS, layer=0)
    together = PagedAttention(batch, cache, None).attend(0, queries, keys_values)
    for row in batch.rows:
        tokens = slice(row.start, row.start + row.tokens)
        alone = a_batch((batch.token_ids[tokens].tolist(), row.context_tokens - row.tokens, row.blocks))
        mixed = PagedAttention(alone, cache, None).attend(0, queries[tokens], keys_values[tokens])
        assert torch.equal(mixed, together[tokens])


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 20), (torch.bfloat16, 128)])
def test_keys_outside_the_window_are_not_read(dtype: torch.dtype, head_dim: int) -> None:
    config = a_config(head_dim=head_dim, window=100)
    rows = ((1, 500), (400, 300))
    batch, cache, queries, keys_values = a_step(config, dtype, rows, layer=0)
    first_seen = (500 + 1 - 100, 300 - 99)
    for row, first in zip(batch.rows, first_seen, strict=True):
        for position in range(first):
            slot = row.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
            cache.data[0, :, :, slot] = float("nan")
    assert not PagedAttention(batch, cache, 100).attend(0, queries, keys_values).isnan().any()


# 8 kv heads of 128 numbers, so that five rows on 256 tokens are worth a pass of their own
WIDE = a_config(heads=16, kv_heads=8, head_dim=128)
DOCUMENT = (31, 30, 5, 6, 7)


def a_shared_step(dtype: torch.dtype) -> tuple[Batch, KvCache, torch.Tensor, torch.Tensor]:
    """Six sequences on one document of five blocks, one of them alike in four only; two others, one mid-prompt."""
    generator = torch.Generator().manual_seed(0)
    cache = KvCache(WIDE, 40, dtype=dtype)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    rows = [([1], 320 + 13 * row, (*DOCUMENT, 10 + 2 * row, 11 + 2 * row)) for row in range(5)]
    rows += [([1], 319, (*DOCUMENT[:4], 22)), ([1], 100, (24, 23)), ([1, 2, 3], 300, (*DOCUMENT, 25))]
    batch = a_batch(*rows)
    queries = torch.randn(len(batch.token_ids), 16, 128, generator=generator).to(dtype)
    keys_values = torch.randn(len(batch.token_ids), 16, 128, generator=generator).to(dtype)
    cache.write(0, batch.slots, keys_values)
    return batch, cache, queries, keys_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_document_read_once_for_all_gives_each_its_own(dtype: torch.dtype) -> None:
    batch, cache, queries, keys_values = a_shared_step(dtype)
    attention = PagedAttention(batch, cache, None)
    assert [len(cascade.tails) for cascade in attention._cascades] == [6]
    expected = attention_reference(queries, batch, cache=cache, layer=0)
    assert (attention.attend(0, queries, keys_values) - expected).abs().max() < TOLERANCE[dtype]
    sinks = torch.linspace(-1, 3, 16)
    expected = attention_reference(queries, batch, cache=cache, layer=0, sinks=sinks)
    assert (attention.attend(0, queries, keys_values, sinks=sinks) - expected).abs().max() < TOLERANCE[dtype]


def test_an_exact_batch_shows_neither_neighbours_nor_the_place_of_blocks() -> None:
    batch, cache, queries, keys_values = a_shared_step(torch.float32)
    together = PagedAttention(replace(batch, is_exact=True), cache, None).attend(0, queries, keys_values)
    for row in batch.rows[:6]:
        span, old = slice(row.start, row.start + 1), row.blocks
        alone = replace(a_batch(([1], row.context_tokens - 1, range(len(old)))), is_exact=True)
        moved = KvCache(WIDE, len(old))
        slots = (torch.tensor(old)[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()
        moved.data.copy_(cache.data[:, :, :, slots])
        mixed = PagedAttention(alone, moved, None).attend(0, queries[span], keys_values[span])
        assert torch.equal(mixed, together[span])
