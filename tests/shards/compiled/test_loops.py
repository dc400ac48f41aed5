"""The compiled loops against torch's operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from shards.compiled.attention import attend_rows
from shards.compiled.floats import bits, loop
from shards.compiled.products import row_times_bfloat16, row_times_int8
from shards.compiled.rows import normalise, normalise_and_turn, quantise
from shards.network.rope import Rotation, rotate_in_place

NOTHING = np.empty(0, np.float32)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_times_a_matrix_in_bfloat16_is_rounded_once(has_bias: bool) -> None:
    row, matrix, bias = (
        drawn(200, dtype=torch.bfloat16),
        drawn(70, 200, seed=1, dtype=torch.bfloat16),
        drawn(70, seed=2),
    )
    out = torch.empty(70, dtype=torch.bfloat16)
    row_times_bfloat16(bits(row), bits(matrix), bias.numpy() if has_bias else NOTHING, bits(out))
    exact = matrix.float() @ row.float() + (bias if has_bias else 0)
    torch.testing.assert_close(out.float(), exact, rtol=2**-8, atol=1e-5)


def test_what_is_no_number_in_a_row_is_none_in_its_product() -> None:
    row, matrix = drawn(64, dtype=torch.bfloat16), drawn(8, 64, seed=1, dtype=torch.bfloat16)
    row[3] = float("nan")
    out = torch.empty(8, dtype=torch.bfloat16)
    row_times_bfloat16(bits(row), bits(matrix), NOTHING, bits(out))
    assert out.isnan().all()


@given(seed=st.integers(0, 2**31), inputs=st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_sums_of_an_int8_product_are_exact(seed: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, 256, (inputs,), generator=generator, dtype=torch.uint8)
    matrix = torch.randint(-127, 128, (9, inputs), generator=generator, dtype=torch.int8)
    scales, out = torch.rand(9, generator=generator), torch.empty(9)
    row_times_int8(bits(row), bits(matrix), bits(scales), bits(out))
    assert torch.equal(out, (matrix.int() @ (row.int() - 128)).float() * scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    rows, weight = drawn(5, 300, dtype=dtype), drawn(300, seed=1, dtype=dtype)
    out = torch.empty_like(rows)
    normalise(bits(rows), bits(weight), 1e-6, bits(out))
    expected = functional.rms_norm(rows.float(), (300,), weight.float(), 1e-6)
    torch.testing.assert_close(out.float(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_and_keys_are_normalised_and_turned_and_values_stay(dtype: torch.dtype, has_norm: bool) -> None:
    heads, weight = drawn(3, 7, 16, dtype=dtype), drawn(5, 16, seed=1, dtype=dtype)
    angles = torch.rand(3, 1, 8) * 6
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
    expected = heads.float()
    if has_norm:
        expected[:, :5] = functional.rms_norm(expected[:, :5], (16,), None, 1e-6) * weight.float()
    rotate_in_place(expected[:, :5], Rotation(rotation.cos.float(), rotation.signed_sin.float()))
    weights = weight if has_norm else weight[:0]
    normalise_and_turn(
        bits(heads), 5, bits(weights), 1e-6, bits(rotation.cos.squeeze(1)), bits(rotation.signed_sin.squeeze(1))
    )
    torch.testing.assert_close(heads.float(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_rows_are_rounded_to_255_steps_between_their_largest_magnitudes() -> None:
    rows = drawn(4, 130)
    rows[2] = 0
    numbers, largest = torch.empty(4, 130, dtype=torch.uint8), torch.empty(4, 1)
    quantise(bits(rows), bits(numbers), bits(largest))
    assert torch.equal(largest[:, 0], rows.abs().amax(1).clamp_min(1e-30))
    restored = (numbers.float() - 128) * largest / 127
    assert ((restored - rows).abs() <= largest / 127 * 0.5001).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_cannot_be_quantised_has_no_finite_scale(bad: float) -> None:
    rows = drawn(2, 40)
    rows[0, 7] = bad
    numbers, largest = torch.empty(2, 40, dtype=torch.uint8), torch.empty(2, 1)
    quantise(bits(rows), bits(numbers), bits(largest))
    assert not largest[0].isfinite()
    assert largest[1].isfinite()


@given(
    seed=st.integers(0, 2**31), contexts=st.lists(st.integers(1, 200), min_size=1, max_size=4), has_sinks=st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_attention_mixes_what_each_row_sees(seed: int, contexts: list[int], has_sinks: bool) -> None:
    kv_heads, group, dim, blocks = 2, 3, 16, 20
    rng, rows = np.random.default_rng(seed), len(contexts)
    layer = drawn(2, kv_heads, blocks * 64, dim, seed=seed, dtype=torch.bfloat16)
    queries = drawn(rows + 1, kv_heads, group, dim, seed=seed + 1, dtype=torch.bfloat16)
    sinks = drawn(kv_heads, group, seed=seed + 2)
    tables = rng.permutation(blocks)[: rows * 4].reshape(rows, 4).astype(np.int64)
    first_seen = np.array([int(rng.integers(0, context)) for context in contexts])
    out = torch.zeros_like(queries)
    tokens, given_sinks = np.arange(1, rows + 1), bits(sinks) if has_sinks else NOTHING.reshape(0, 0)
    scale = np.float32(dim**-0.5)
    attend_rows(
        bits(queries), bits(layer), tokens, tables, first_seen, np.array(contexts), scale, given_sinks, bits(out)
    )
    for row, (context, first) in enumerate(zip(contexts, first_seen.tolist(), strict=True)):
        seen = np.arange(first, context)
        slots = torch.from_numpy(tables[row][seen // 64] * 64 + seen % 64)
        keys, values = layer[:, :, slots].float()
        scores = queries[row + 1].float() @ keys.mT * dim**-0.5
        if has_sinks:
            scores = torch.cat((scores, sinks.unsqueeze(-1)), -1)
        expected = scores.softmax(-1)[..., : len(seen)] @ values
        torch.testing.assert_close(out[row + 1].float(), expected, rtol=2**-7, atol=1e-3)
    assert not out[0].any()


def test_a_loop_is_compiled_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.dispatcher import Dispatcher

    def refuse(_: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(Dispatcher, "enable_caching", refuse)

    @loop("void(float32[::1])")
    def double(numbers: np.ndarray) -> None:  # type: ignore[type-arg]
        for index in range(len(numbers)):
            numbers[index] *= 2

    numbers = np.ones(3, np.float32)
    double(numbers)
    assert numbers.tolist() == [2, 2, 2]
