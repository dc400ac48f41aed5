"""Matrices in fewer bits times rows: numbers are dequantised on their way to the matrix units."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shards.kernels.launch import Gpu, Launch, as_operand, dot, gpu_of, require, require_shape
from shards.quant.matrix import FOUR_BITS_ZERO, QuantisedMatrix

FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile: the matrix units multiply at least 16; with more rows, larger tiles read a matrix less often."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a kernel reads the numbers of a matrix, as constants: see `QuantisedMatrix`.

    It reads `inputs` columns at once, all with the same scale unless one scale is for the whole row.
    """

    per_byte: int
    one_scale: bool
    inputs: int

    @classmethod
    def of(cls, matrix: QuantisedMatrix, dtype: torch.dtype) -> Packing:
        """The packing for rows of type `dtype`. Raises ValueError for groups that no tile divides."""
        one_scale, most = matrix.scales.shape[-1] == 1, 32 if dtype == torch.float32 else 64
        per_byte = 2 if matrix.has_four_bits else 1
        if one_scale:
            return cls(per_byte, True, min(most, max(16, triton.next_power_of_2(matrix.shape[1]))))
        # the largest power of two that divides a group
        inputs = min(most, matrix.group & -matrix.group)
        require(inputs >= 16, f"groups of {matrix.group} columns are no multiple of 16")
        return cls(per_byte, False, inputs)

    def constants(self) -> dict[str, int | float | bool | str]:
        """The constants of `quantised_sums`."""
        return {
            "PER_BYTE": self.per_byte,
            "ONE_SCALE": self.one_scale,
            "INPUTS": self.inputs,
            "ZERO": FOUR_BITS_ZERO,
        }


def multiply_quantised_reference(
    rows: torch.Tensor, matrix: QuantisedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`rows` [rows, in] times `matrix` [out, in], plus `bias` [out]. The reference for `multiply_quantised`.

    Inputs are those of the stored columns: `matrix.order` is not looked at. In float32, rounded once.
    """
    wide = QuantisedMatrix(matrix.numbers, matrix.scales, matrix.group, matrix.zeros).dequantised(torch.float32)
    result = rows.float() @ wide.mT
    return (result if bias is None else result + bias.float()).to(rows.dtype)


@triton.jit
def quantised_sums(
    at_rows,
    in_rows,
    numbers,
    scales,
    zeros,
    column,
    in_columns,
    inputs,
    groups,
    group,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    INPUTS: tl.constexpr,
    ZERO: tl.constexpr,
):
    """float32 [ROWS, COLUMNS]: rows at `at_rows` [ROWS, 1] times the matrix rows `column` [COLUMNS] int64."""
    # two numbers in a byte
    at_numbers = numbers + (column * (inputs // PER_BYTE))[:, None]
    at_scales = scales + column * groups
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inputs, INPUTS):
        inner = start + tl.arange(0, INPUTS)
        in_inner = inner < inputs
        left = tl.load(at_rows + inner[None, :], mask=in_rows[:, None] & in_inner[None, :], other=0.0)
        byte = start // PER_BYTE + tl.arange(0, INPUTS // PER_BYTE)
        in_bytes = in_columns[:, None] & (byte < inputs // PER_BYTE)[None, :]
        stored = tl.load(at_numbers + byte[None, :], mask=in_bytes, other=0.0)
        # one tile lies within one group
        at_group = 0 if ONE_SCALE else start // group
        if PER_BYTE == 2:
            whole = tl.interleave(stored & 15, stored >> 4).to(tl.int32)
            if zeros is None:
                whole -= ZERO
        elif zeros is not None:
            whole = stored.to(tl.int32)
        else:
            whole = stored
        if zeros is not None:
            zero = tl.load(zeros + column * groups + at_group, mask=in_columns, other=0)
            whole -= zero.to(tl.int32)[:, None]
        # every type of rows holds these whole numbers exactly, and e4m3 as well
        part = dot(as_operand(left, left.dtype), tl.trans(as_operand(whole, left.dtype)))
        if ONE_SCALE:
            sums += part
        else:
            scale = tl.load(at_scales + at_group, mask=in_columns, other=0.0).to(tl.float32)
            sums += part * scale[None, :]
    if ONE_SCALE:
        sums *= tl.load(at_scales, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    return sums


# the number of rows changes from step to step: one compilation serves all
@triton.jit(do_not_specialize=["count"])
def _multiply_quantised(
    rows,
    numbers,
    scales,
    zeros,
    bias,
    out,
    count,
    inputs,
    outputs,
    groups,
    group,
    rows_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    INPUTS: tl.constexpr,
    ZERO: tl.constexpr,
):
    # neighbours in the grid read the same part of the matrix
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < count
    in_columns = column < outputs
    sums = quantised_sums(
        # int64 before multiplying: 100,000 rows of 28672, and a matrix of 53248 x 16384, pass 2**31
        rows + row.to(tl.int64)[:, None] * rows_row,
        in_rows,
        numbers,
        scales,
        zeros,
        column.to(tl.int64),
        in_columns,
        inputs,
        groups,
        group,
        ROWS,
        COLUMNS,
        PER_BYTE,
        ONE_SCALE,
        INPUTS,
        ZERO,
    )
    if bias is not None:
        sums += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    at_out = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def multiply_quantised(
    rows: torch.Tensor, matrix: QuantisedMatrix, bias: torch.Tensor | None = None, *, gpu: Gpu | None = None
) -> torch.Tensor:
    """The result of `multiply_quantised_reference`. Raises ValueError for other shapes, and on a GPU without e4m3 for
    numbers of this type.

    Scales multiply sums, so they are not rounded to the type of the rows. A row's result does not depend on the numbers
    of other rows.
    """
    gpu = gpu or gpu_of(rows.device)
    outputs, inputs = matrix.shape
    require_shape("rows", rows, (rows.shape[0], inputs))
    require(rows.stride(1) == 1, "a row is not in one piece")
    require_matrix(matrix, gpu)
    if bias is not None:
        require_shape("bias", bias, (outputs,))
    packing = Packing.of(matrix, rows.dtype)
    out = rows.new_empty(rows.shape[0], outputs)
    tile = FEW_ROWS if rows.shape[0] <= FEW_ROWS else MANY_ROWS
    row_tiles = triton.cdiv(rows.shape[0], tile)
    columns = columns_of(outputs, row_tiles, gpu)
    constants = {"ROWS": tile, "COLUMNS": columns, **packing.constants()}
    grid = (row_tiles, triton.cdiv(outputs, columns))
    arguments = (
        *(rows, matrix.numbers, matrix.scales, matrix.zeros, bias, out),
        *(rows.shape[0], inputs, outputs, matrix.scales.shape[1], matrix.group, rows.stride(0)),
    )
    gpu.start(Launch(_multiply_quantised, grid, arguments, constants, warps=4, stages=3))
    return out


def columns_of(outputs: int, row_tiles: int, gpu: Gpu) -> int:
    """Outputs of a tile: 128, or fewer if there would be less than two programs for each multiprocessor."""
    columns = 128
    while columns > 16 and row_tiles * triton.cdiv(outputs, columns) < 2 * gpu.processors:
        columns //= 2
    return columns


def require_matrix(matrix: QuantisedMatrix, gpu: Gpu) -> None:
    """Raise ValueError unless `gpu` can read this matrix."""
    is_e4m3 = matrix.numbers.dtype == torch.float8_e4m3fn
    require(not is_e4m3 or gpu.chip.has_e4m3, f"{gpu.chip.name} has no e4m3: use another file of this model")
    require(all(tensor.is_contiguous() for tensor in matrix.tensors()), "the matrix is not in one piece")
    groups = (*matrix.numbers.shape[:-1], matrix.scales.shape[-1])
    require_shape("scales", matrix.scales, groups)
    if matrix.zeros is not None:
        require_shape("zeros", matrix.zeros, groups)


def has_kernel(matrix: QuantisedMatrix, device: torch.device) -> bool:
    """Whether the GPU of this device multiplies this matrix as it is stored; if not, it is to be dequantised."""
    is_e4m3 = matrix.numbers.dtype == torch.float8_e4m3fn
    in_tiles = matrix.scales.shape[-1] == 1 or not matrix.group % 16
    return in_tiles and (not is_e4m3 or gpu_of(device).chip.has_e4m3)
