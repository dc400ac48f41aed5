"""A matrix in fewer bits, in the one form that all published formats are read into."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FOUR_BITS_ZERO = 8
"""The number that stands for 0 in four bits, where a matrix has no zeros of its own."""

_PIECE_ROWS = 256
"""Rows that are dequantised at once: their float32 copy stays in the cache."""


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix [out, in]: the number n in row r and column c stands for (n - zeros[r, g]) * scales[r, g], and g is c //
    group.

    `numbers` are int8 or float8_e4m3fn [out, in], or uint8 [out, in / 2] with two four-bit numbers each, first the low
    bits. `scales` [out, groups] are floating. `zeros` int16 [out, groups]; None: 8 for four bits, else 0. Column c
    multiplies input `order[c]`, or input c. `quantises_inputs`: the format means inputs to be rounded to int8 too.
    """

    numbers: Tensor
    scales: Tensor
    group: int
    zeros: Tensor | None = None
    order: Tensor | None = None
    quantises_inputs: bool = False

    @property
    def has_four_bits(self) -> bool:
        """Whether a byte holds two numbers."""
        return self.numbers.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, stored = self.numbers.shape
        return outputs, 2 * stored if self.has_four_bits else stored

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that it consists of."""
        yield from (held for held in (self.numbers, self.scales, self.zeros, self.order) if held is not None)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in] as `dtype`, with columns in the order of inputs; computed in float32, rounded once."""
        outputs, inputs = self.shape
        out = torch.empty(outputs, inputs, dtype=dtype, device=self.numbers.device)
        for start in range(0, outputs, _PIECE_ROWS):
            piece = slice(start, start + _PIECE_ROWS)
            out[piece] = self._wide(piece)
        if self.order is None:
            return out
        return out[:, self.order.argsort()]

    def rows(self, chosen: slice | Tensor) -> QuantisedMatrix:
        """The matrix of these rows, a range or their numbers."""
        # torch cannot index float8
        numbers = self.numbers.view(torch.uint8)[chosen].view(self.numbers.dtype)
        zeros = None if self.zeros is None else self.zeros[chosen]
        return replace(self, numbers=numbers, scales=self.scales[chosen], zeros=zeros)

    def columns(self, start: int, stop: int) -> QuantisedMatrix:
        """The matrix of the columns from `start` up to `stop`. If these are no whole groups, it has smaller ones.

        Raises ValueError if columns are not in the order of inputs, or if a byte holds numbers of two parts.
        """
        if self.order is not None:
            raise ValueError("columns that were reordered by activation (desc_act) cannot be divided")
        if self.has_four_bits and (start % 2 or stop % 2):
            raise ValueError(f"columns {start} to {stop} are no whole bytes of two numbers")
        width = 2 if self.has_four_bits else 1
        is_single = self.scales.shape[1] == 1
        group = math.gcd(start, self.group) if stop == self.shape[1] else math.gcd(start, stop, self.group)
        groups = slice(start // group, -(-stop // group))

        def by_group(held: Tensor) -> Tensor:
            return held if is_single else held.repeat_interleave(self.group // group, 1)[:, groups].contiguous()

        return replace(
            self,
            numbers=self.numbers[:, start // width : stop // width].contiguous(),
            scales=by_group(self.scales),
            zeros=None if self.zeros is None else by_group(self.zeros),
            group=stop - start if is_single else group,
        )

    def moved(self, device: torch.device) -> QuantisedMatrix:
        """The same matrix on `device`, every tensor in one piece."""
        placed = [None if held is None else held.to(device).contiguous() for held in (self.zeros, self.order)]
        numbers, scales = self.numbers.to(device).contiguous(), self.scales.to(device).contiguous()
        return replace(self, numbers=numbers, scales=scales, zeros=placed[0], order=placed[1])

    def _wide(self, piece: slice) -> Tensor:
        """Some rows in float32, with columns as stored."""
        stored = self.numbers[piece]
        wide = unpack_four_bits(stored).float() if self.has_four_bits else stored.float()
        inputs = wide.shape[1]
        if self.zeros is not None:
            wide -= self._by_column(self.zeros[piece].float(), inputs)
        elif self.has_four_bits:
            wide -= FOUR_BITS_ZERO
        return wide.mul_(self._by_column(self.scales[piece].float(), inputs))

    def _by_column(self, by_group: Tensor, inputs: int) -> Tensor:
        return by_group if by_group.shape[1] == 1 else by_group.repeat_interleave(self.group, 1)[:, :inputs]


StoredMatrix = Tensor | QuantisedMatrix
"""A matrix [out, in], quantised or not."""


def dense_of(part: StoredMatrix, dtype: torch.dtype) -> Tensor:
    """The matrix in floating point; one that is not quantised stays as it is."""
    return part.dequantised(dtype) if isinstance(part, QuantisedMatrix) else part


def stacked(parts: Iterable[StoredMatrix], dtype: torch.dtype) -> StoredMatrix:
    """The matrices as one, stacked by rows: quantised if all are, and alike; else in floating point, as `dtype`."""
    held = list(parts)
    if len(held) == 1:
        return held[0]
    matrices = [part for part in held if isinstance(part, QuantisedMatrix)]
    first = matrices[0] if matrices else None
    if first is None or len(matrices) < len(held) or not all(_are_alike(first, matrix) for matrix in matrices):
        return torch.cat([dense_of(part, dtype) for part in held])
    zeros = None
    if any(matrix.zeros is not None for matrix in matrices):
        zeros = torch.cat([_explicit_zeros(matrix) for matrix in matrices])
    numbers = torch.cat([matrix.numbers.view(torch.uint8) for matrix in matrices]).view(first.numbers.dtype)
    return replace(first, numbers=numbers, scales=torch.cat([matrix.scales for matrix in matrices]), zeros=zeros)


def select_rows(part: StoredMatrix, chosen: Tensor) -> StoredMatrix:
    """The rows of `part` with these numbers."""
    return part.rows(chosen) if isinstance(part, QuantisedMatrix) else part[chosen]


def select_columns(part: StoredMatrix, own: range) -> StoredMatrix:
    """These columns of `part`. Raises ValueError as `QuantisedMatrix.columns`."""
    if isinstance(part, QuantisedMatrix):
        return part.columns(own.start, own.stop)
    return part[:, own.start : own.stop].contiguous()


def ordered_by_group(numbers: Tensor, groups: Tensor, group: int) -> tuple[Tensor, Tensor | None]:
    """Numbers [out, in] with the columns of a group beside each other, and the input of each column.

    `groups` [in] are the groups of the columns. None in place of the inputs if nothing moves. Raises ValueError if
    the groups are not all of `group` columns, except for the last one.
    """
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups[order].long(), torch.arange(len(groups)) // group):
        raise ValueError(f"the columns are not in groups of {group}")
    if torch.equal(order, torch.arange(len(order))):
        return numbers, None
    return numbers[:, order], order


def pack_four_bits(numbers: Tensor) -> Tensor:
    """uint8 [out, in] below 16 as [out, in / 2]: two in a byte, first the low bits."""
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)


def unpack_four_bits(packed: Tensor) -> Tensor:
    """uint8 [out, 2 * packed] below 16 from uint8 [out, packed]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _are_alike(first: QuantisedMatrix, other: QuantisedMatrix) -> bool:
    same_order = (first.order is None) == (other.order is None)
    if same_order and first.order is not None and other.order is not None:
        same_order = torch.equal(first.order, other.order)
    return same_order and (first.numbers.dtype, first.group, first.scales.dtype, first.quantises_inputs) == (
        *(other.numbers.dtype, other.group, other.scales.dtype),
        other.quantises_inputs,
    )


def _explicit_zeros(matrix: QuantisedMatrix) -> Tensor:
    if matrix.zeros is not None:
        return matrix.zeros
    return torch.full(matrix.scales.shape, FOUR_BITS_ZERO if matrix.has_four_bits else 0, dtype=torch.int16)
