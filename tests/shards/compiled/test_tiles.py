"""Tiles of products in bfloat16, on CPUs with AVX512-BF16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from shards.compiled.floats import bits
from shards.compiled.tiles import LANES, ROWS, add_tile, has_tiles


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no AVX512-BF16, or matrix units")
@pytest.mark.parametrize("pairs", [1, 50])
def test_a_tile_adds_the_products_of_its_rows_and_lanes(pairs: int) -> None:
    generator = torch.Generator().manual_seed(pairs)
    left, right = (torch.randn(count, 2 * pairs, generator=generator).bfloat16() for count in (ROWS, LANES))
    before = torch.randn(ROWS, LANES, generator=generator)
    sums = before.numpy().copy()
    add(words(left), words(right), sums)
    expected = before + left.float() @ right.float().T
    torch.testing.assert_close(torch.from_numpy(sums), expected, rtol=1e-5, atol=1e-4)


@njit
def add(left: np.ndarray, right: np.ndarray, sums: np.ndarray) -> None:  # type: ignore[type-arg]
    add_tile(left, right, sums)


def words(numbers: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    """`numbers` [rows, inputs] as words [pairs, rows]."""
    return np.ascontiguousarray(bits(numbers).view(np.uint32).T)


def test_a_cpu_that_numba_is_told_about_counts_and_not_the_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from numba.core.registry import cpu_target

    features = ""
    codegen = cpu_target.target_context.codegen()
    monkeypatch.setattr(type(codegen), "magic_tuple", lambda _: ("x86_64", "a CPU", features))
    assert not has_tiles()
    features = "+avx512f,+avx512bf16"
    assert has_tiles()
    features = "+avx512bf16,+amx-bf16"
    assert not has_tiles()
