"""Matrices in int8, for CPUs that are limited by memory bandwidth: half the bytes of bfloat16, and integer sums.

Weights have one scale per output channel, activations one per row: the row's largest magnitude. So a row's result
depends on that row alone. The sums are integers, hence exact in any order, and both ways to compute them (below) give
the same bits. A row alone, a row among others, with any number of threads: the same bits.

torch's own dynamic quantisation (`quantized.linear_dynamic`) takes one activation scale from the whole batch: with it
an outlier in a neighbour's row raised the error of a row from 1 % to 27 %.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shards.compiled.floats import bits
from shards.compiled.products import row_times_int8
from shards.compiled.rows import quantise

_LARGEST = 127
_ZERO_POINT = 128
_SMALLEST_ABSMAX = 1e-30
"""Smaller magnitudes are treated as this; a row of zeros is divided by it."""

_FEW_ELEMENTS = 1 << 18
"""Matrices with fewer elements are not packed: a packed product costs 50 us more per call, an unpacked one 0.15 us per
1024 elements from two rows on (one thread, AVX512-VNNI)."""

_PIECE_ROWS = 256
"""Rows that are quantised at once. Larger pieces leave holes in the heap: up to 1 GB for 0.6 G parameters at 4096."""


class Int8Linear:
    """`hidden` [..., in] times an int8 matrix [out, in], plus a bias [out]: float32 [..., out]; see `quantise`.

    Rows of `hidden` are rounded to 255 steps between their largest magnitude and its negative. A row of zeros gives
    the bias; a row with NaN or infinity gives no finite number, without effect on other rows.
    """

    def __init__(
        self, matrix: Tensor, scales: Tensor, bias: Tensor | None = None, *, keeps_plain: bool = False
    ) -> None:
        """`matrix` int8 [out, in] without -128, `scales` float32 [out]: the factors of its rows.

        If it `keeps_plain`, a packed matrix is kept plain too, for steps of one row, which are then twice as fast.
        """
        self.out, self.inner = matrix.shape
        # a row is divided by its largest magnitude and multiplied by 127 before it is rounded
        self._scales, self._bias = scales / _LARGEST, bias
        self._zero_points = torch.zeros(self.out, dtype=torch.int64)
        self.is_packed = matrix.numel() >= _FEW_ELEMENTS and packing_is_exact()
        self._packed = torch.ops.onednn.qlinear_prepack(matrix, None) if self.is_packed else None
        self._plain = matrix.contiguous() if keeps_plain or not self.is_packed else None

    def __repr__(self) -> str:
        return f"Int8Linear({self.inner} to {self.out}, {'packed' if self.is_packed else 'plain'})"

    @classmethod
    def quantise(cls, parts: Iterable[Tensor], bias: Tensor | None = None, *, keeps_plain: bool = False) -> Int8Linear:
        """Quantise matrices [out, in], stacked by rows. They are taken one by one, so only one must be in memory."""
        pieces = [quantise_rows(piece) for part in parts for piece in torch.split(part, _PIECE_ROWS)]
        matrix, scales = (torch.cat(column) for column in zip(*pieces, strict=True))
        pieces.clear()
        return cls(matrix, scales, bias if bias is None else bias.float(), keeps_plain=keeps_plain)

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product, float32."""
        rows = hidden.reshape(-1, self.inner).float()
        numbers, largest = torch.empty(rows.shape, dtype=torch.uint8), torch.empty(len(rows), 1)
        quantise(bits(rows), bits(numbers), bits(largest))
        product = self._multiply(numbers)
        product = product.mul_(largest) if self._bias is None else torch.addcmul(self._bias, product, largest)
        return product.view(*hidden.shape[:-1], self.out)

    def _multiply(self, numbers: Tensor) -> Tensor:
        """(`numbers` - 128) [rows, in] uint8 times the matrix and its scales, float32."""
        if len(numbers) == 1 and self._plain is not None:
            product = torch.empty(1, self.out)
            row_times_int8(bits(numbers)[0], bits(self._plain), bits(self._scales), bits(product)[0])
            return product
        if self._packed is not None:
            return multiply_packed(numbers, self._packed, self._scales, self._zero_points)
        assert self._plain is not None, "a matrix is packed or plain"
        sums = torch._int_mm(numbers.sub_(_ZERO_POINT).view(torch.int8), self._plain.t())
        return sums.float().mul_(self._scales)


def quantise_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`matrix` [out, in] as int8, and the float32 scales [out] that restore it within half a scale."""
    wide = matrix.float()
    scales = wide.abs().amax(-1).clamp_min_(_SMALLEST_ABSMAX) / _LARGEST
    return wide.div(scales.unsqueeze(-1)).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales


def multiply_packed(numbers: Tensor, packed: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    """(`numbers` - 128) times a matrix that `qlinear_prepack` packed, times `scales`, by oneDNN.

    The only call of this torch operator, which is made for compiled graphs and documented only in
    aten/src/ATen/native/quantized/cpu/qlinear.cpp.
    """
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        numbers, 1.0, _ZERO_POINT, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def packing_is_exact() -> bool:
    """Whether this torch can multiply packed int8 matrices on this CPU, with exact sums.

    CPUs without VNNI may add pairs of products in 16 bits, which overflow with the extremes that are tried here.
    """
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    matrix = torch.full((64, 256), _LARGEST, dtype=torch.int8)
    matrix[::2] *= -1
    numbers = torch.full((2, 256), _ZERO_POINT + _LARGEST, dtype=torch.uint8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(matrix, None)
        product = multiply_packed(numbers, packed, torch.ones(64), torch.zeros(64, dtype=torch.int64))
    except RuntimeError:
        return False
    return torch.equal(product[1], matrix.sum(-1).float() * _LARGEST)
