"""The changes of LoRA adapters, added to a matrix's product: each row has one of several adapters, or none.

Rows with the same adapter are multiplied together, as in Punica (arXiv 2310.18547) and S-LoRA (arXiv 2311.03285).
"""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shards.kernels.launch import Gpu, Launch, as_operand, dot, gpu_of, require, require_shape

RANK_STEP = 16
"""Ranks are multiples of this: the matrix units multiply at least 16."""

FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile: more rows read an adapter less often."""

_MOST_SPLITS, _SPLIT_INPUTS = 16, 256
"""Few rows are few programs, so the inputs are divided among up to 16, with 256 inputs each or more."""


@dataclass(frozen=True, slots=True)
class LowRankSlots:
    """The changes of one matrix [out, in] in all slots, an adapter each. Its outputs are divided into parts.

    downs [slots, parts, ranks, in] and ups [slots, out, ranks], where only the slots may be apart; ranks [slots, parts]
    int32 are the ranks in use, 0 where an adapter changes nothing; what is behind them is not read. bounds [parts + 1]
    int32 are the first outputs of the parts, and `out`; `widest` is the widest part.
    """

    downs: torch.Tensor
    ups: torch.Tensor
    ranks: torch.Tensor
    bounds: torch.Tensor
    widest: int


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a product that have an adapter: sources [rows] int32, ordered by slot.

    tiles [tiles, slot|start|stop] int32: `sources[start:stop]`, at most `most`, have the adapter in this slot. An
    unused tile has slot -1.
    """

    sources: torch.Tensor
    tiles: torch.Tensor
    most: int


def add_low_rank_reference(
    outputs: torch.Tensor, hidden: torch.Tensor, slots: LowRankSlots, rows: AdaptedRows
) -> torch.Tensor:
    """`outputs` [rows, out] with the change of each row's adapter for `hidden` [rows, in]. The reference for
    `add_low_rank`.

    The inner numbers are rounded to the type of `hidden`; the sum is float32, rounded once.
    """
    result, bounds = outputs.clone(), slots.bounds.tolist()
    for slot, start, stop in rows.tiles.tolist():
        if slot < 0:
            continue
        own = rows.sources[start:stop].long()
        for part, rank in enumerate(slots.ranks[slot].tolist()):
            inner = (hidden[own].float() @ slots.downs[slot, part, :rank].float().mT).to(hidden.dtype)
            first, end = bounds[part : part + 2]
            change = inner.float() @ slots.ups[slot, first:end, :rank].float().mT
            result[own, first:end] = (result[own, first:end].float() + change).to(result.dtype)
    return result


# the number of rows changes from step to step: one compilation serves all
@triton.jit(do_not_specialize=["count", "split_inputs"])
def _shrink(
    hidden,
    downs,
    ranks,
    sources,
    tiles,
    inner,
    count,
    inputs,
    split_inputs,
    hidden_row,
    downs_slot,
    ranks_slot,
    PARTS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.load(tiles + 3 * tile)
    if slot < 0:
        return
    part = tl.program_id(2) // (MOST_RANK // RANKS)
    first = tl.program_id(2) % (MOST_RANK // RANKS) * RANKS
    used = tl.load(ranks + slot * ranks_slot + part)
    if first >= used:
        return
    pair = tl.load(tiles + 3 * tile + 1) + tl.arange(0, ROWS)
    in_rows = pair < tl.load(tiles + 3 * tile + 2)
    source = tl.load(sources + pair, mask=in_rows, other=0)
    rank = first + tl.arange(0, RANKS)
    # int64 before multiplying: 100,000 rows of 28672, and 32 adapters of 100 M numbers, pass 2**31
    at_rows = hidden + source.to(tl.int64)[:, None] * hidden_row
    at_down = downs + slot.to(tl.int64) * downs_slot + ((part * MOST_RANK + rank) * inputs)[:, None]
    split = tl.program_id(1)
    end = tl.minimum(inputs, (split + 1) * split_inputs)
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(split * split_inputs, end, INPUTS):
        at = start + tl.arange(0, INPUTS)
        in_inputs = at < end
        left = tl.load(at_rows + at[None, :], mask=in_rows[:, None] & in_inputs[None, :], other=0.0)
        right = tl.load(at_down + at[None, :], mask=(rank < used)[:, None] & in_inputs[None, :], other=0.0)
        sums += dot(as_operand(left, left.dtype), tl.trans(as_operand(right, left.dtype)))
    at_inner = inner + (split * count + pair).to(tl.int64)[:, None] * (PARTS * MOST_RANK) + part * MOST_RANK
    tl.store(at_inner + rank[None, :], sums, mask=in_rows[:, None])


@triton.jit(do_not_specialize=["count", "splits"])
def _expand(
    inner,
    ups,
    ranks,
    bounds,
    sources,
    tiles,
    outputs,
    count,
    splits,
    ups_slot,
    ranks_slot,
    outputs_row,
    PARTS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.load(tiles + 3 * tile)
    if slot < 0:
        return
    part = tl.program_id(2)
    used = tl.load(ranks + slot * ranks_slot + part)
    column = tl.load(bounds + part) + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < tl.load(bounds + part + 1)
    pair = tl.load(tiles + 3 * tile + 1) + tl.arange(0, ROWS)
    in_rows = pair < tl.load(tiles + 3 * tile + 2)
    # int64 before multiplying, as above
    at_ups = ups + slot.to(tl.int64) * ups_slot + column.to(tl.int64)[:, None] * MOST_RANK
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, used, RANKS):
        rank = first + tl.arange(0, RANKS)
        wide = tl.zeros([ROWS, RANKS], tl.float32)
        # always in this order, so that equal steps give equal bits
        for split in range(splits):
            at_inner = inner + (split * count + pair).to(tl.int64)[:, None] * (PARTS * MOST_RANK) + part * MOST_RANK
            wide += tl.load(at_inner + rank[None, :], mask=in_rows[:, None], other=0.0)
        up = tl.load(at_ups + rank[None, :], mask=in_columns[:, None] & (rank < used)[None, :], other=0.0)
        sums += dot(as_operand(wide.to(up.dtype), up.dtype), tl.trans(as_operand(up, up.dtype)))
    if used > 0:
        source = tl.load(sources + pair, mask=in_rows, other=0)
        at_out = outputs + source.to(tl.int64)[:, None] * outputs_row + column[None, :]
        in_both = in_rows[:, None] & in_columns[None, :]
        before = tl.load(at_out, mask=in_both, other=0.0)
        tl.store(at_out, (before.to(tl.float32) + sums).to(before.dtype), mask=in_both)


def add_low_rank(
    outputs: torch.Tensor, hidden: torch.Tensor, slots: LowRankSlots, rows: AdaptedRows, *, gpu: Gpu | None = None
) -> None:
    """Change `outputs` to the result of `add_low_rank_reference`, with two launches. Raises ValueError for other
    shapes.
    """
    gpu = gpu or gpu_of(outputs.device)
    count, (_, parts, most_rank, inputs) = len(hidden), slots.downs.shape
    _require(outputs, hidden, slots, rows)
    tiles, ranks = len(rows.tiles), min(64, most_rank & -most_rank)
    # for many rows, tiles alone are enough programs
    most_splits = _MOST_SPLITS if rows.most == FEW_ROWS else 1
    splits = max(1, min(most_splits, inputs // _SPLIT_INPUTS))
    # larger tiles would not fit into registers
    wide = 128 if rows.most == FEW_ROWS else 64
    step = min(32 if hidden.dtype == torch.float32 else wide, max(16, triton.next_power_of_2(inputs)))
    split_inputs = triton.cdiv(triton.cdiv(inputs, splits), step) * step
    inner = torch.empty(splits, count, parts * most_rank, dtype=torch.float32, device=hidden.device)
    constants = {"PARTS": parts, "MOST_RANK": most_rank, "ROWS": rows.most, "RANKS": ranks}
    gpu.start(
        Launch(
            _shrink,
            (tiles, splits, parts * (most_rank // ranks)),
            (
                *(hidden, slots.downs, slots.ranks, rows.sources, rows.tiles, inner),
                *(count, inputs, split_inputs, hidden.stride(0), slots.downs.stride(0), slots.ranks.stride(0)),
            ),
            constants | {"INPUTS": step},
            stages=3,
        )
    )
    columns = min(wide, max(16, triton.next_power_of_2(slots.widest)))
    gpu.start(
        Launch(
            _expand,
            (tiles, triton.cdiv(slots.widest, columns), parts),
            (
                *(inner, slots.ups, slots.ranks, slots.bounds, rows.sources, rows.tiles, outputs),
                *(count, splits, slots.ups.stride(0), slots.ranks.stride(0), outputs.stride(0)),
            ),
            constants | {"COLUMNS": columns},
        )
    )


def _require(outputs: torch.Tensor, hidden: torch.Tensor, slots: LowRankSlots, rows: AdaptedRows) -> None:
    count, (adapters, parts, most_rank, inputs) = len(hidden), slots.downs.shape
    require_shape("hidden", hidden, (count, inputs))
    require_shape("outputs", outputs, (count, slots.ups.shape[1]))
    require_shape("ups", slots.ups, (adapters, slots.ups.shape[1], most_rank))
    require_shape("ranks", slots.ranks, (adapters, parts))
    require_shape("bounds", slots.bounds, (parts + 1,))
    require_shape("sources", rows.sources, (count,))
    require_shape("tiles", rows.tiles, (len(rows.tiles), 3))
    require(most_rank % RANK_STEP == 0, f"a slot has ranks up to {most_rank}, which is no multiple of {RANK_STEP}")
    require(rows.most in (FEW_ROWS, MANY_ROWS), f"tiles have {rows.most} rows, not {FEW_ROWS} or {MANY_ROWS}")
    for name, tensor in (("hidden", hidden), ("outputs", outputs), ("ranks", slots.ranks)):
        require(tensor.stride(-1) == 1, f"a row of {name} is not in one piece")
    require(slots.downs[0].is_contiguous() and slots.ups[0].is_contiguous(), "a slot is not in one piece")
    require(outputs.dtype == hidden.dtype == slots.downs.dtype == slots.ups.dtype, "types differ")
