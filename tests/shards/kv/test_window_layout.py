from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.kv.keys import BLOCK_TOKENS
from shards.kv.window_layout import KvLayout, KvWindow, divide

GEMMA_12B = KvWindow(1024, 40 * 2 * 8 * 256 * 2 * BLOCK_TOKENS)
GEMMA_12B_BLOCK = 48 * 2 * 8 * 256 * 2 * BLOCK_TOKENS
GPT_OSS_20B = KvWindow(128, 12 * 2 * 8 * 64 * 2 * BLOCK_TOKENS)
GPT_OSS_20B_BLOCK = 24 * 2 * 8 * 64 * 2 * BLOCK_TOKENS


def layout(blocks: int, window: KvWindow, block_bytes: int, **more: int) -> KvLayout:
    usual = {"context_tokens": 131_072, "max_running": 64, "chunk_tokens": 8192}
    return divide(blocks, window, block_bytes=block_bytes, **(usual | more))


def test_a_long_context_gets_more_blocks_in_the_same_memory() -> None:
    gemma = layout(1600, GEMMA_12B, GEMMA_12B_BLOCK)
    assert (gemma.blocks, gemma.pages, gemma.chunk_tokens) == (4125, 1095, 2048)
    gpt_oss = layout(10_000, GPT_OSS_20B, GPT_OSS_20B_BLOCK)
    assert (gpt_oss.blocks, gpt_oss.pages, gpt_oss.chunk_tokens) == (19_105, 895, 2048)


def test_blocks_without_memory_are_as_many_as_running_sequences_can_name() -> None:
    mistral = KvWindow(4096, 1000)
    assert layout(1000, mistral, 1000, context_tokens=32_768) == KvLayout(15 * 512, mistral, 1000, 4096)
    assert layout(1000, mistral, 1000, context_tokens=32_768, max_running=3) == KvLayout(3 * 512, mistral, 1000, 4096)


@pytest.mark.parametrize(
    "window",
    [KvWindow(262_144, 500), KvWindow(131_072, 1000), KvWindow(4096, 500)],
    ids=["longer than the context", "the context, in all layers", "longer than the memory"],
)
def test_one_pool_stays_one_where_nothing_is_won(window: KvWindow) -> None:
    assert layout(60, window, 1000) == KvLayout(60)


def test_a_small_pool_keeps_half_of_its_memory_for_short_sequences() -> None:
    assert layout(40, GPT_OSS_20B, GPT_OSS_20B_BLOCK).pages == 20


@given(
    blocks=st.integers(1, 5000),
    tokens=st.integers(1, 5000),
    page_share=st.integers(1, 16),
    max_running=st.integers(1, 300),
    chunk_tokens=st.integers(4, 200).map(lambda blocks: blocks * BLOCK_TOKENS),
    unit_tokens=st.sampled_from([BLOCK_TOKENS, 256]),
    context_tokens=st.integers(100, 200_000),
)
def test_a_layout_fits_the_memory_and_every_chunk_its_pages(
    blocks: int,
    tokens: int,
    page_share: int,
    max_running: int,
    chunk_tokens: int,
    unit_tokens: int,
    context_tokens: int,
) -> None:
    window = KvWindow(tokens, page_share)
    found = divide(
        blocks,
        window,
        block_bytes=16,
        context_tokens=context_tokens,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        unit_tokens=unit_tokens,
    )
    if found.window is None:
        assert found == KvLayout(blocks)
        return
    assert found.blocks > blocks
    assert found.blocks * (16 - page_share) + found.pages * page_share <= blocks * 16
    assert unit_tokens <= found.chunk_tokens <= chunk_tokens
    assert window.pages(found.chunk_tokens) <= found.pages


@given(tokens=st.integers(1, 400), start=st.integers(0, 2000), new=st.integers(1, 500))
def test_the_most_pages_of_a_window_are_enough_wherever_it_lies(tokens: int, start: int, new: int) -> None:
    window = KvWindow(tokens, 1)
    seen = range(window.first_seen(start), (start + new - 1) // BLOCK_TOKENS + 1)
    assert len(seen) <= window.pages(new)
    assert (seen.start + 1) * BLOCK_TOKENS > start - tokens + 1
