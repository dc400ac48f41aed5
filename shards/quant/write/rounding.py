"""Matrices rounded to fewer bits, each scale by its own numbers: no calibration data, and no order of layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_E4M3 = 448.0
_LARGEST_INT8, _HALF_OF_FOUR_BITS = 127.0, 8

_SHRINKING = tuple(1.0 - 0.05 * step for step in range(8))
"""Shares of the largest magnitude that four bits are tried to span: a few clipped numbers can be worth finer steps."""

_SMALLEST = 1e-12
"""The scale of zeros, by which they can be divided."""


class Rounded(NamedTuple):
    """Numbers as they are stored, or in four bits as int8 from -8 to 7, and their scales [out, groups]."""

    numbers: Tensor
    scales: Tensor


def to_fp8(matrix: Tensor, scale_dtype: torch.dtype) -> Rounded:
    """float32 [out, in] as e4m3 with a scale [out, 1] for each row."""
    scales = _scales(matrix.abs().amax(1, keepdim=True) / LARGEST_E4M3, scale_dtype)
    return Rounded(_e4m3(matrix / scales.float()), scales)


def to_fp8_blocks(matrix: Tensor, block: int) -> Rounded:
    """float32 [out, in] as e4m3 with a float32 scale for each `block` x `block`."""
    rows, columns = matrix.shape
    down, right = -(-rows // block), -(-columns // block)
    padded = torch.zeros(down * block, right * block)
    padded[:rows, :columns] = matrix
    tiles = padded.view(down, block, right, block)
    scales = _scales(tiles.abs().amax((1, 3)) / LARGEST_E4M3, torch.float32)
    numbers = _e4m3(tiles / scales[:, None, :, None]).view(torch.uint8).view(padded.shape)[:rows, :columns]
    return Rounded(numbers.contiguous().view(torch.float8_e4m3fn), scales)


def to_int8(matrix: Tensor, scale_dtype: torch.dtype) -> Rounded:
    """float32 [out, in] as int8 with a scale [out, 1] for each row."""
    scales = _scales(matrix.abs().amax(1, keepdim=True) / _LARGEST_INT8, scale_dtype)
    numbers = (matrix / scales.float()).round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8)
    return Rounded(numbers.to(torch.int8), scales)


def to_int4(matrix: Tensor, group: int, scale_dtype: torch.dtype) -> Rounded:
    """float32 [out, in] in four bits with a scale for each `group` columns: of a few, the one with the least squared
    error.
    """
    grouped = matrix.view(len(matrix), -1, group)
    largest = grouped.abs().amax(-1)
    best_error = torch.full(largest.shape, torch.inf)
    best_scales = torch.empty(largest.shape, dtype=scale_dtype)
    for share in _SHRINKING:
        scales = _scales(largest * share / (_HALF_OF_FOUR_BITS - 0.5), scale_dtype)
        wide = scales.float().unsqueeze(-1)
        error = (_four_bits(grouped / wide).mul_(wide) - grouped).square_().sum(-1)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scales = torch.where(is_better, scales, best_scales)
    numbers = _four_bits(grouped / best_scales.float().unsqueeze(-1))
    return Rounded(numbers.to(torch.int8).view(matrix.shape), best_scales)


def _e4m3(quotients: Tensor) -> Tensor:
    return quotients.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)


def _four_bits(quotients: Tensor) -> Tensor:
    return quotients.round_().clamp_(-_HALF_OF_FOUR_BITS, _HALF_OF_FOUR_BITS - 1)


def _scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.clamp_min(_SMALLEST).to(dtype)
