"""Matrices in MXFP4 as checkpoints store them: groups of 32 numbers in four bits (e2m1) with one power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Numbers with a scale in common, neighbours in a row."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., groups * 32] as `dtype`, which holds them exactly if it is bfloat16 or float32.

    `blocks` uint8 [..., groups, 16] have two numbers each, first the one in the low bits; `scales` uint8 [..., groups]
    are exponents of 2, biased by 127. Matrices are converted one by one, so that only one is held as float32.
    """
    values = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    out = torch.empty(*blocks.shape[:-2], blocks.shape[-2] * GROUP, dtype=dtype)
    for packed, exponents, target in zip(blocks, scales, out, strict=True):
        numbers = torch.stack((values[(packed & 15).long()], values[(packed >> 4).long()]), -1).flatten(-2)
        target.copy_(torch.ldexp(numbers, exponents.unsqueeze(-1).int() - _BIAS).flatten(-2))
    return out
