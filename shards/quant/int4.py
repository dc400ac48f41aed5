"""Matrices in four bits on CPUs, by torch's own product: a quarter of the bytes of bfloat16, read once per step.

One row of 1024 numbers times 3072 x 1024 took 0.17 ms, as bfloat16 0.27 ms, as int8 0.13 ms; 256 rows 19, 8.5 and 5 ms
(one thread, AVX512-VNNI).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shards.quant.matrix import FOUR_BITS_ZERO, QuantisedMatrix, unpack_four_bits

_GROUPS = (256, 128, 64, 32)
"""Columns with a scale in common that torch's kernel takes, largest first."""

_ROWS = 16
"""Outputs must be a multiple of this."""


class Int4Linear:
    """`hidden` [..., in] bfloat16 times a matrix of four-bit numbers, plus a bias [out]: [..., out] of the same type.

    Scales, and zeros times scales, are rounded to bfloat16; products are summed in float32.
    """

    def __init__(self, matrix: QuantisedMatrix, bias: Tensor | None = None) -> None:
        self.out, self.inner = matrix.shape
        group = _group_of(matrix)
        assert group is not None, "takes() was asked"
        scales = matrix.scales.float()
        above = torch.zeros_like(scales) if matrix.zeros is None else (FOUR_BITS_ZERO - matrix.zeros.float()) * scales
        pairs = torch.stack((scales, above), -1).repeat_interleave(matrix.group // group, 1)
        self._group, self._order, self._bias = group, matrix.order, bias
        # the kernel has [groups, out, 2]
        self._scales = pairs.transpose(0, 1).to(torch.bfloat16).contiguous()
        numbers = unpack_four_bits(matrix.numbers).int()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)

    def __repr__(self) -> str:
        return f"Int4Linear({self.inner} to {self.out}, groups of {self._group})"

    @staticmethod
    def takes(matrix: QuantisedMatrix, dtype: torch.dtype) -> bool:
        """Whether this matrix can be multiplied with activations of type `dtype` here."""
        # with float32 torch has a loop without vectors, 30 times as slow
        is_fast = dtype == torch.bfloat16 and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        return matrix.has_four_bits and is_fast and not matrix.shape[0] % _ROWS and _group_of(matrix) is not None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product, in the dtype of `hidden`."""
        rows = hidden.reshape(-1, self.inner)
        rows = rows.contiguous() if self._order is None else rows[:, self._order]
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._packed, self._group, self._scales)
        product = product if self._bias is None else product.add_(self._bias)
        return product.view(*hidden.shape[:-1], self.out)


def _group_of(matrix: QuantisedMatrix) -> int | None:
    """The largest group of the kernel that divides the matrix's own, and the inputs."""
    inputs = matrix.shape[1]
    fitting = (group for group in _GROUPS if not matrix.group % group and not inputs % matrix.group)
    return next(fitting, None)
