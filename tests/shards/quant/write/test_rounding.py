"""Rounding of matrices to fewer bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shards.quant.write.rounding import LARGEST_E4M3, to_fp8, to_fp8_blocks, to_int4, to_int8


@pytest.fixture
def matrix() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(48, 192)


def test_int8_errs_by_half_a_step_at_most(matrix: Tensor) -> None:
    numbers, scales = to_int8(matrix, torch.float32)
    assert int(numbers.abs().max()) == 127
    assert float(((numbers * scales - matrix).abs() / scales).max()) <= 0.5 + 1e-4


def test_fp8_errs_by_a_sixteenth_of_a_number_at_most(matrix: Tensor) -> None:
    numbers, scales = to_fp8(matrix, torch.float32)
    assert float(numbers.float().abs().max()) == LARGEST_E4M3
    # below the smallest normal number the step is 2 ** -9
    bound = torch.maximum(matrix.abs() / 16, scales * 2**-10) * (1 + 1e-5)
    assert bool(((numbers.float() * scales - matrix).abs() <= bound).all())


def test_blocks_have_scales_of_their_own_and_the_last_ones_may_be_smaller(matrix: Tensor) -> None:
    matrix[:32, :64] *= 1000
    numbers, scales = to_fp8_blocks(matrix, 64)
    assert (numbers.shape, scales.shape) == (matrix.shape, (1, 3))
    assert float(scales[0, 0] / scales[0, 1]) > 500
    wide = scales.repeat_interleave(64, 0)[:48].repeat_interleave(64, 1)
    assert float((numbers.float() * wide - matrix).abs().max() / matrix.abs().max()) < 1 / 16


def test_four_bits_take_the_scale_with_the_least_error_of_each_group(matrix: Tensor) -> None:
    matrix[:, 0] = 9.0
    numbers, scales = to_int4(matrix, 64, torch.float32)
    assert (int(numbers.min()), int(numbers.max())) == (-8, 7)
    read = numbers.view(48, 3, 64) * scales.unsqueeze(-1)
    plain = matrix.view(48, 3, 64).abs().amax(-1, keepdim=True) / 7.5
    spanning = (matrix.view(48, 3, 64) / plain).round().clamp(-8, 7) * plain
    errors, others = ((each - matrix.view(48, 3, 64)).square().sum(-1) for each in (read, spanning))
    assert bool((errors <= others + 1e-4).all())
    assert float(errors.sum()) < 0.97 * float(others.sum())


@pytest.mark.parametrize("rounded", [to_int8, to_fp8, lambda zeros, dtype: to_int4(zeros, 32, dtype)])
def test_zeros_stay_zeros(rounded: type) -> None:
    numbers, scales = rounded(torch.zeros(4, 64), torch.bfloat16)
    assert not numbers.float().any()
    assert scales.dtype == torch.bfloat16
    assert bool(torch.isfinite(scales.float()).all())
