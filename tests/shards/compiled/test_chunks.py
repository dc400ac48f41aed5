"""Attention in tiles against sums in float32, on CPUs with AVX512-BF16."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.compiled.floats import bits
from shards.compiled.tiles import has_tiles

pytestmark = pytest.mark.skipif(not has_tiles(), reason="this CPU has no AVX512-BF16, or matrix units")

KV_HEADS, DIM, BLOCKS = 2, 64, 24
ALL = 1 << 30


class Step(NamedTuple):
    """Queries of some chunks (start, tokens, context), the cache's layer, and the blocks of each chunk."""

    queries: torch.Tensor
    layer: torch.Tensor
    chunks: list[tuple[int, int, int]]
    tables: np.ndarray  # type: ignore[type-arg]


def a_step(seed: int, group: int, shapes: list[tuple[int, int]]) -> Step:
    """A step of chunks with so many tokens and positions before; what no chunk sees is NaN."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    layer = torch.randn(2, KV_HEADS, BLOCKS * 64, DIM, generator=generator).bfloat16()
    tables, is_seen = rng.permutation(BLOCKS).reshape(len(shapes), -1).astype(np.int64), torch.zeros(BLOCKS * 64)
    chunks, start = [], 1
    for (tokens, past), table in zip(shapes, tables, strict=True):
        chunks.append((start, tokens, past + tokens))
        is_seen[slots_of(table, past + tokens)] = 1
        start += tokens + 1
    layer[:, :, is_seen == 0] = float("nan")
    return Step(torch.randn(start, KV_HEADS, group, DIM, generator=generator).bfloat16(), layer, chunks, tables)


def slots_of(table: np.ndarray, context: int) -> torch.Tensor:  # type: ignore[type-arg]
    positions = np.arange(context)
    return torch.from_numpy(table[positions // 64] * 64 + positions % 64)


def attended(step: Step, *, window: int = ALL, sinks: torch.Tensor | None = None) -> torch.Tensor:
    from shards.compiled.chunks import attend_chunks

    out, chunks = torch.zeros_like(step.queries), np.array(step.chunks, np.int64)
    given_sinks = np.empty((0, 0), np.float32) if sinks is None else bits(sinks)
    words, scale = bits(step.queries).view(np.uint32), np.float32(DIM**-0.5)
    attend_chunks(words, bits(step.layer), chunks, step.tables, window, scale, given_sinks, bits(out))
    return out


@given(
    seed=st.integers(0, 2**31),
    group=st.sampled_from([1, 2, 3, 8]),
    shapes=st.sampled_from([1, 2, 4]).flatmap(
        lambda count: st.lists(st.tuples(st.integers(1, 200), st.integers(0, 180)), min_size=count, max_size=count)
    ),
    window=st.sampled_from([1, 7, 64, 100, ALL]),
    has_sinks=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_each_token_mixes_what_it_sees(
    seed: int, group: int, shapes: list[tuple[int, int]], window: int, has_sinks: bool
) -> None:
    step = a_step(seed, group, shapes)
    sinks = torch.randn(KV_HEADS, group, generator=torch.Generator().manual_seed(seed)) if has_sinks else None
    out = attended(step, window=window, sinks=sinks)
    is_computed = torch.zeros(len(out), dtype=torch.bool)
    for (start, tokens, context), table in zip(step.chunks, step.tables, strict=True):
        is_computed[start : start + tokens] = True
        keys, values = step.layer[:, :, slots_of(table, context)].float()
        scores = torch.einsum("thgd,hcd->hgtc", step.queries[start : start + tokens].float(), keys) * DIM**-0.5
        age = torch.arange(context - tokens, context)[:, None] - torch.arange(context)
        scores = scores.masked_fill((age < 0) | (age >= window), -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[..., None, None].expand(-1, -1, tokens, 1)), -1)
        expected = torch.einsum("hgtc,hcd->thgd", scores.softmax(-1)[..., :context], values)
        torch.testing.assert_close(out[start : start + tokens].float(), expected, rtol=2**-6, atol=1e-2)
    assert not out[~is_computed].any()


@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 299), max_size=4), window=st.sampled_from([90, ALL]))
@settings(max_examples=20, deadline=None)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(seed: int, cuts: set[int], window: int) -> None:
    whole = a_step(seed, 2, [(300, 0)])
    out = attended(whole, window=window)
    ends = [0, *sorted(cuts), 300]
    for begin, end in pairwise(ends):
        alone = whole._replace(chunks=[(1 + begin, end - begin, end)])
        part = slice(1 + begin, 1 + end)
        assert torch.equal(attended(alone, window=window)[part], out[part])


def test_what_is_no_number_in_a_query_stays_with_its_token() -> None:
    step = a_step(3, 2, [(70, 10)])
    clean = attended(step)
    step.queries[5, 0, 1, 4] = float("nan")
    out = attended(step)
    assert out[5, 0, 1].isnan().all()
    out[5, 0, 1] = clean[5, 0, 1]
    assert torch.equal(out, clean)
