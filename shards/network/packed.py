"""Matrices in bfloat16 for CPUs: packed for oneDNN, and plain for steps of one row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from shards.compiled.floats import bits
from shards.compiled.products import row_times_bfloat16
from shards.network.layers import DenseLinear, Linear
from shards.quant.linear import cpu_linear
from shards.quant.matrix import StoredMatrix

_FEW_ELEMENTS = 1 << 18
"""Matrices with fewer elements stay as they are: they are in the caches anyway."""


class PackedLinear:
    """`hidden` [..., in] bfloat16 times a matrix [out, in], plus a bias [out], as bfloat16.

    torch packs a matrix for oneDNN again in each product, which takes as long as reading it twice; here it is packed
    once. A single row is multiplied by a loop that reads the plain matrix. So both are kept, which is twice the memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out, self.inner = weight.shape
        self._weight, self._bias = weight.contiguous(), bias
        self._bias_numbers = np.empty(0, np.float32) if bias is None else bias.float().numpy()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)

    def __repr__(self) -> str:
        return f"PackedLinear({self.inner} to {self.out})"

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product."""
        rows = hidden.reshape(-1, self.inner)
        if len(rows) == 1:
            product = rows.new_empty(1, self.out)
            row_times_bfloat16(bits(rows)[0], bits(self._weight), self._bias_numbers, bits(product)[0])
        else:
            product = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return product.view(*hidden.shape[:-1], self.out)


def packs(weight: Tensor) -> bool:
    """Whether `weight` is a matrix that `PackedLinear` is for, on this CPU."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_large = weight.dtype == torch.bfloat16 and weight.numel() >= _FEW_ELEMENTS
    return bool(is_large and has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_linear(parts: Iterable[StoredMatrix], bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """The layer of `cpu_linear`, packed if it is dense and large."""
    linear = cpu_linear(parts, bias, dtype)
    is_packed = isinstance(linear, DenseLinear) and packs(linear.weight)
    return PackedLinear(linear.weight, linear.bias) if isinstance(linear, DenseLinear) and is_packed else linear
