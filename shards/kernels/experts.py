"""Matrices of a mixture of experts: rows that are sorted by expert, each times the matrix of its own."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shards.kernels.launch import Gpu, Launch, as_operand, dot, gpu_of, require, require_shape
from shards.kernels.quantised import FEW_ROWS, MANY_ROWS, Packing, quantised_sums, require_matrix
from shards.quant.matrix import QuantisedMatrix


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Pairs of token and expert, sorted by expert. Without a copy to the host, so that a graph can contain it.

    tokens [pairs] is the token of each pair, places [pairs] its number before sorting (token * chosen + choice);
    bounds [experts + 1] are the first pairs of each expert. All int32.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    bounds: torch.Tensor

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int) -> SortedRows:
        """The pairs of `chosen` [tokens, chosen]: numbers of experts, integers."""
        numbers, places = chosen.flatten().sort(stable=True)
        bounds = torch.searchsorted(numbers, torch.arange(experts + 1, device=chosen.device, dtype=numbers.dtype))
        tokens = places // chosen.shape[1]
        return cls(tokens.to(torch.int32), places.to(torch.int32), bounds.to(torch.int32))


def multiply_by_expert_reference(
    rows: torch.Tensor,
    matrices: torch.Tensor | QuantisedMatrix,
    *,
    experts: int,
    bounds: torch.Tensor,
    sources: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each pair's row times the matrix of its expert. The reference for `multiply_by_expert`.

    Shapes: rows [rows, in]; matrices [experts, out, in] of its type, or quantised [experts * out, in] with columns in
    the order of inputs; bias [experts, out] of its type; bounds [experts + 1] as in `SortedRows`; returned
    [pairs, out] of that type. Pair p reads row sources[p], or p, and its result is row
    targets[p], or p, multiplied by shares[targets[p]] float32, or 1. In float32, rounded once.
    """
    pairs = int(bounds[-1])
    if isinstance(matrices, QuantisedMatrix):
        matrices = matrices.dequantised(torch.float32).view(experts, -1, rows.shape[1])
    out = rows.new_empty(pairs, matrices.shape[1])
    for expert in range(experts):
        own = torch.arange(int(bounds[expert]), int(bounds[expert + 1]), device=rows.device)
        read = own if sources is None else sources[own].long()
        written = own if targets is None else targets[own].long()
        result = rows[read].float() @ matrices[expert].float().mT
        if bias is not None:
            result = result + bias[expert].float()
        if shares is not None:
            result = result * shares[written, None]
        out[written] = result.to(rows.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Held:
    """The matrices of all experts as the kernel takes them; no scales if they are in floating point."""

    outputs: int
    inputs: int
    numbers: torch.Tensor
    packing: Packing
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    groups: int = 1
    group: int = 1

    @classmethod
    def of(cls, matrices: torch.Tensor | QuantisedMatrix, experts: int, dtype: torch.dtype, gpu: Gpu) -> _Held:
        if not isinstance(matrices, QuantisedMatrix):
            require(matrices.is_contiguous(), "matrices are not in one piece")
            require(dtype == matrices.dtype, f"rows are {dtype} and matrices {matrices.dtype}")
            require(matrices.shape[0] == experts, f"{matrices.shape[0]} matrices for {experts} experts")
            inputs = matrices.shape[2]
            width = min(32 if dtype == torch.float32 else 64, max(16, triton.next_power_of_2(inputs)))
            packing = Packing(per_byte=1, one_scale=True, inputs=width)
            return cls(matrices.shape[1], inputs, matrices, packing)
        require_matrix(matrices, gpu)
        require(matrices.order is None, "experts with reordered columns have no kernel")
        rows, inputs = matrices.shape
        require(rows % experts == 0, f"{rows} rows are not those of {experts} experts")
        packing = Packing.of(matrices, dtype)
        numbers, scales, zeros = matrices.numbers, matrices.scales, matrices.zeros
        return cls(rows // experts, inputs, numbers, packing, scales, zeros, scales.shape[1], matrices.group)


# the numbers of rows change from step to step: one compilation serves all
@triton.jit(do_not_specialize=["experts"])
def _multiply_by_expert(
    rows,
    matrices,
    scales,
    zeros,
    bounds,
    sources,
    targets,
    bias,
    shares,
    out,
    experts,
    inputs,
    outputs,
    groups,
    group,
    rows_row,
    EXPERTS_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    ZERO: tl.constexpr,
):
    # the tiles of all experts, one expert after the other: this program's expert, and its tile among that one's
    tile = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS_TILE)
    first = tl.load(bounds + numbers, mask=numbers < experts, other=0)
    end = tl.load(bounds + 1 + numbers, mask=numbers < experts, other=0)
    tiles = tl.cdiv(end - first, ROWS)
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    # more programs are started than there can be tiles
    if expert >= experts:
        return
    before = tl.sum(tl.where(numbers < expert, tiles, 0), axis=0)
    own_first = tl.sum(tl.where(numbers == expert, first, 0), axis=0)
    own_end = tl.sum(tl.where(numbers == expert, end, 0), axis=0)
    pair = own_first + (tile - before) * ROWS + tl.arange(0, ROWS)
    in_rows = pair < own_end
    read = pair
    if sources is not None:
        read = tl.load(sources + pair, mask=in_rows, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < outputs
    # int64 before multiplying: 128 experts of 1536 x 2048 pass 2**28, and larger ones 2**31
    at_rows = rows + read.to(tl.int64)[:, None] * rows_row
    matrix_row = expert.to(tl.int64) * outputs + column
    if scales is None:
        at_matrix = matrices + matrix_row[:, None] * inputs
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, inputs, INPUTS):
            inner = start + tl.arange(0, INPUTS)
            in_inner = inner < inputs
            left = tl.load(at_rows + inner[None, :], mask=in_rows[:, None] & in_inner[None, :], other=0.0)
            right = tl.load(at_matrix + inner[None, :], mask=in_columns[:, None] & in_inner[None, :], other=0.0)
            sums += dot(as_operand(left, left.dtype), tl.trans(as_operand(right, left.dtype)))
    else:
        sums = quantised_sums(
            at_rows,
            in_rows,
            matrices,
            scales,
            zeros,
            matrix_row,
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
        added = tl.load(bias + expert.to(tl.int64) * outputs + column, mask=in_columns, other=0.0)
        sums += added.to(tl.float32)[None, :]
    written = pair
    if targets is not None:
        written = tl.load(targets + pair, mask=in_rows, other=0)
    if shares is not None:
        sums *= tl.load(shares + written, mask=in_rows, other=0.0)[:, None]
    at_out = out + written.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def multiply_by_expert(
    rows: torch.Tensor,
    matrices: torch.Tensor | QuantisedMatrix,
    *,
    experts: int,
    pairs: int,
    bounds: torch.Tensor,
    sources: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    gpu: Gpu | None = None,
) -> torch.Tensor:
    """The result of `multiply_by_expert_reference` for `pairs` pairs, the last of `bounds`. Raises ValueError for other
    shapes.
    """
    gpu = gpu or gpu_of(rows.device)
    held = _Held.of(matrices, experts, rows.dtype, gpu)
    outputs, inputs = held.outputs, held.inputs
    require_shape("rows", rows, (rows.shape[0], inputs))
    require(rows.stride(1) == 1, "a row is not in one piece")
    require_shape("bounds", bounds, (experts + 1,))
    for name, numbers in (("sources", sources), ("targets", targets), ("shares", shares)):
        if numbers is not None:
            require_shape(name, numbers, (pairs,))
    require(sources is not None or rows.shape[0] == pairs, f"{rows.shape[0]} rows are not those of {pairs} pairs")
    if bias is not None:
        require_shape("bias", bias, (experts, outputs))
    out = rows.new_empty(pairs, outputs)
    tile = FEW_ROWS if pairs <= experts * FEW_ROWS else MANY_ROWS
    constants = {
        "EXPERTS_TILE": max(16, triton.next_power_of_2(experts)),
        "ROWS": tile,
        "COLUMNS": min(64, max(16, triton.next_power_of_2(outputs))),
        **held.packing.constants(),
    }
    # each expert may begin one tile that is not full
    grid = (min(pairs, triton.cdiv(pairs, tile) + experts), triton.cdiv(outputs, constants["COLUMNS"]))
    arguments = (
        *(rows, held.numbers, held.scales, held.zeros, bounds, sources, targets, bias, shares, out),
        *(experts, inputs, outputs, held.groups, held.group, rows.stride(0)),
    )
    gpu.start(Launch(_multiply_by_expert, grid, arguments, constants, warps=4, stages=3))
    return out
