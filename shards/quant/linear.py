"""Linear layers of matrices that may be quantised: as they are stored, as a CPU multiplies them, or all in int8."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shards.network.layers import DenseLinear, Linear
from shards.quant.int4 import Int4Linear
from shards.quant.int8 import Int8Linear
from shards.quant.matrix import QuantisedMatrix, StoredMatrix, dense_of, stacked


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """A quantised matrix [out, in] as it is stored, with a bias [out] or none."""

    matrix: QuantisedMatrix
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product with the dequantised matrix, in the dtype of `hidden`; slow, since it dequantises each time."""
        return functional.linear(hidden, self.matrix.dequantised(hidden.dtype), self.bias)


@dataclass(frozen=True, slots=True)
class RoundedLinear:
    """An int8 product; its result has the type of its input."""

    product: Int8Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product, in the dtype of `hidden`."""
        return self.product(hidden).to(hidden.dtype)


def stored_linear(parts: Iterable[StoredMatrix], bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """The layer of `parts`, stacked by rows, in the bits in which they are stored; `dtype` is that of activations."""
    matrix = stacked(parts, dtype)
    return QuantisedLinear(matrix, bias) if isinstance(matrix, QuantisedMatrix) else DenseLinear(matrix, bias)


def cpu_linear(parts: Iterable[StoredMatrix], bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """The layer of `parts`, stacked by rows, in the fastest way in which a CPU multiplies these numbers.

    Four bits stay four bits if `dtype` is bfloat16. int8 stays int8 if inputs are rounded too. All others are
    dequantised once: torch converts float8 at 4 ns a number, in which time it multiplies 40 of bfloat16.
    """
    matrix = stacked(parts, dtype)
    if not isinstance(matrix, QuantisedMatrix):
        return DenseLinear(matrix, bias)
    if Int4Linear.takes(matrix, dtype):
        return Int4Linear(matrix, bias)
    if matrix.quantises_inputs and _fits_int8(matrix):
        return RoundedLinear(_int8(matrix, bias))
    return DenseLinear(matrix.dequantised(dtype), bias)


def int8_linear(
    parts: Iterable[StoredMatrix], bias: Tensor | None, dtype: torch.dtype, *, keeps_plain: bool = False
) -> Linear:
    """The layer of `parts`, stacked by rows, in int8; only parts with one scale a row are not rounded again.

    `keeps_plain` as in `Int8Linear`.
    """

    def widened() -> Iterable[Tensor]:
        # one by one, so that only one is in memory
        return (dense_of(part, dtype) for part in held)

    held = list(parts) if isinstance(parts, list | tuple) else parts
    if isinstance(held, list | tuple) and held and all(isinstance(part, QuantisedMatrix) for part in held):
        matrix = stacked(held, dtype)
        if isinstance(matrix, QuantisedMatrix) and _fits_int8(matrix):
            return _int8(matrix, bias, keeps_plain=keeps_plain)
    return Int8Linear.quantise(widened(), bias, keeps_plain=keeps_plain)


def _fits_int8(matrix: QuantisedMatrix) -> bool:
    is_plain = matrix.zeros is None and matrix.order is None and matrix.scales.shape[1] == 1
    return matrix.numbers.dtype == torch.int8 and is_plain


def _int8(matrix: QuantisedMatrix, bias: Tensor | None, *, keeps_plain: bool = False) -> Int8Linear:
    scales, added = matrix.scales.float().flatten(), None if bias is None else bias.float()
    return Int8Linear(matrix.numbers, scales, added, keeps_plain=keeps_plain)
