"""Attention of one new token per sequence over its pages, cut into splits of one fixed size.

The size of a split does not depend on the batch, so a result does not either: alone and beside 63 others it is the
same, bit for bit. A fixed number of programs takes splits from a list that is made on the GPU: the launch is the same
for every batch, as CUDA graphs require, and one context of 128k beside many short ones keeps all processors busy.
"""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shards.kernels.cache import require_layer, strides
from shards.kernels.gather_pages import gather_pages_reference
from shards.kernels.launch import Gpu, Launch, gpu_of, require, require_shape
from shards.kernels.paged import attend_to_page, begin, constants_of, page_bytes, require_sinks, score_scale

# 8 pages: 256 KiB of bf16 keys and values of 128 dimensions, some 8 us of one processor's share of 4 TB/s, against
# about 1 us to fill its pipeline; 8192 tokens of context in 8 heads are 128 splits: an H200 has 132 processors.
SPLIT_TOKENS = 512

# Numbers of partial results that one warp merges at once: 16 KiB, loaded with 16 bytes a thread. On an H200 the merging
# of 64 sequences takes 3 us, with 4 warps 8 us: it waits for two loads, so what counts is how many programs wait at a
# time.
MERGED_AT_ONCE = 4096

# The matrix units multiply at least 16 rows.
LEAST_ROWS = 16


def paged_decode_reference(
    query: torch.Tensor,
    kv: torch.Tensor,
    *,
    tables: torch.Tensor,
    context_tokens: torch.Tensor,
    window: int | None = None,
    scales: torch.Tensor | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each query over its own context. The reference for `paged_decode`.

    Shapes: query [sequences, heads, dim], the last position of each context; kv and scales are one layer of the cache,
    as in `require_layer`; tables [sequences, pages] block ids, context_tokens [sequences], both int32; returned like
    query. A query sees the last `window` positions, including its own, or all; without a context the result is 0.
    Scores are multiplied by `scale`, or else by 1 / sqrt(dim); `sinks` [heads] are scores of one more position, without
    a value. Heads of a group are neighbours. All in float32, rounded once.
    """
    out = torch.zeros_like(query)
    for sequence, context in enumerate(context_tokens.tolist()):
        if context:
            shared = {"tokens": context, "dtype": torch.float32, "scales": scales}
            key, value = gather_pages_reference(kv, tables[sequence], **shared)[:, :, -window if window else 0 :]
            grouped = query[sequence].float().view(key.shape[0], -1, key.shape[2])
            scores = grouped @ key.mT * (key.shape[2] ** -0.5 if scale is None else scale)
            if sinks is not None:
                scores = torch.cat([scores, sinks.float().view(*grouped.shape[:2], 1)], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
            out[sequence] = (weights @ value).view(out.shape[1:]).to(out.dtype)
    return out


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The splits of one step, on the GPU, and room for their results. Made once, refilled by `plan_decode`.

    splits [capacity, sequence|split] int32; first_splits [sequences + 1] int32, running sums of the splits per
    sequence; partial [capacity, heads, dim] and logsumexp [capacity, heads] (base 2), float32.
    """

    splits: torch.Tensor
    first_splits: torch.Tensor
    partial: torch.Tensor
    logsumexp: torch.Tensor
    window: int | None

    @classmethod
    def with_room(
        cls, sequences: int, splits: int, *, heads: int, dim: int, device: torch.device, window: int | None = None
    ) -> DecodePlan:
        """An empty plan for exactly `sequences` and at most `splits`, as `splits_of` counts them."""
        return cls(
            splits=torch.empty(splits, 2, dtype=torch.int32, device=device),
            first_splits=torch.empty(sequences + 1, dtype=torch.int32, device=device),
            partial=torch.empty(splits, heads, dim, dtype=torch.float32, device=device),
            logsumexp=torch.empty(splits, heads, dtype=torch.float32, device=device),
            window=window,
        )


def splits_of(context_tokens: Iterable[int], *, window: int | None = None) -> int:
    """The number of splits of these contexts: the room that a plan needs, computed on the host without the GPU."""
    return sum(
        triton.cdiv(context, SPLIT_TOKENS) - (max(0, context - window) // SPLIT_TOKENS if window else 0)
        for context in context_tokens
    )


# the numbers change from step to step: one compilation serves all, instead of new ones for 1 and for multiples of 16
@triton.jit(do_not_specialize=["sequences", "capacity"])
def _plan(
    context_tokens,
    splits,
    first_splits,
    sequences,
    capacity,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    sequence = tl.program_id(0)
    others = tl.arange(0, TILE)
    contexts = tl.load(context_tokens + others, mask=others < sequences, other=0)
    counts = tl.cdiv(contexts, SPLIT)
    oldest = tl.zeros_like(contexts)
    if WINDOW > 0:
        oldest = tl.maximum(contexts - WINDOW, 0) // SPLIT
        counts -= oldest
    first = tl.sum(tl.where(others < sequence, counts, 0), axis=0)
    count = tl.sum(tl.where(others == sequence, counts, 0), axis=0)
    split = tl.sum(tl.where(others == sequence, oldest, 0), axis=0)
    tl.store(first_splits + sequence, first)
    if sequence == sequences - 1:
        tl.store(first_splits + sequences, first + count)
    for start in range(0, count, TILE):
        i = start + others
        mask = (i < count) & (first + i < capacity)
        tl.store(splits + 2 * (first + i), tl.zeros_like(i) + sequence, mask=mask)
        tl.store(splits + 2 * (first + i) + 1, split + i, mask=mask)


@triton.jit(do_not_specialize=["sequences", "table_length"])
def _attend_to_splits(
    query,
    kv,
    scales,
    sinks,
    tables,
    context_tokens,
    splits,
    first_splits,
    partial,
    logsumexp,
    out,
    sequences,
    query_token,
    table_length,
    kv_block,
    kv_side,
    kv_head,
    scales_block,
    scales_side,
    scales_head,
    score_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_TILE)
    offsets = tl.arange(0, BLOCK)
    in_tile = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    items = tl.load(first_splits + sequences) * KV_HEADS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        # int64 before multiplying: splits * heads * dim pass 2**31 where many sequences share a long prefix
        at_split = tl.cast(item // KV_HEADS, tl.int64)
        head = item % KV_HEADS
        sequence = tl.load(splits + 2 * at_split).to(tl.int64)
        split = tl.load(splits + 2 * at_split + 1)
        context = tl.load(context_tokens + sequence)
        start = split * SPLIT
        end = tl.minimum(start + SPLIT, context)
        if WINDOW > 0:
            start = tl.maximum(start, context - WINDOW)
        at_rows = (head * GROUP + rows)[:, None] * DIM + dims[None, :]
        q = tl.load(query + sequence * query_token + at_rows, mask=in_tile, other=0.0)
        is_first = at_split == tl.load(first_splits + sequence)
        carried = begin(sinks, head * GROUP + rows, rows < GROUP, is_first, score_scale, ROWS, DIM_TILE)
        # all ids at once: a load that depends on another load is not prefetched as far as an independent one
        pages = split * (SPLIT // BLOCK) + tl.arange(0, SPLIT // BLOCK)
        blocks = tl.load(tables + sequence * table_length + pages, mask=pages * BLOCK < end, other=0)
        for page in range(start // BLOCK, tl.cdiv(end, BLOCK)):
            # int64 before multiplying: in an 8B model block 512 is already 2**31 elements away
            block = tl.sum(tl.where(pages == page, blocks, 0), axis=0).to(tl.int64)
            positions = page * BLOCK + offsets
            seen = (positions >= start) & (positions < end)
            at = kv + block * kv_block + head * kv_head + offsets[:, None] * DIM + dims[None, :]
            scales_at = scales
            if QUANTISED:
                scales_at = scales + block * scales_block + head * scales_head + offsets
            carried = attend_to_page(
                carried, q, at, scales_at, seen, seen[None, :], kv_side, scales_side, score_scale,
                DIM, DIM_TILE, QUANTISED, True,
            )  # fmt: skip
        result = carried[2] / carried[1][:, None]
        if tl.load(first_splits + sequence + 1) - tl.load(first_splits + sequence) == 1:
            at_out = out + sequence * (KV_HEADS * GROUP * DIM) + at_rows
            tl.store(at_out, result.to(out.dtype.element_ty), mask=in_tile)
        else:
            at_partial = partial + at_split * (KV_HEADS * GROUP * DIM) + at_rows
            tl.store(at_partial, result, mask=in_tile)
            at_sums = logsumexp + at_split * (KV_HEADS * GROUP) + head * GROUP + rows
            tl.store(at_sums, carried[0] * score_scale + tl.log2(carried[1]), mask=rows < GROUP)


@triton.jit
def _merge_splits(
    partial,
    logsumexp,
    first_splits,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    # int64 before multiplying: see _attend_to_splits
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM_TILE)
    first = tl.load(first_splits + sequence)
    end = tl.load(first_splits + sequence + 1)
    # a single split has written its result itself
    if end - first == 1:
        return
    highest = float("-inf")
    total = 0.0
    result = tl.zeros([DIM_TILE], tl.float32)
    for start in range(first, end, TILE):
        split = start + tl.arange(0, TILE)
        row = split.to(tl.int64) * HEADS + head
        sums = tl.load(logsumexp + row, mask=split < end, other=float("-inf"))
        mask = (split < end)[:, None] & (dims < DIM)[None, :]
        parts = tl.load(partial + row[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        higher = tl.maximum(highest, tl.max(sums, axis=0))
        weights = tl.exp2(sums - higher)
        fading = tl.exp2(highest - higher)
        total = total * fading + tl.sum(weights, axis=0)
        result = result * fading + tl.sum(weights[:, None] * parts, axis=0)
        highest = higher
    # a row of padding has no split: its result is 0, which does no harm
    result /= tl.where(end > first, total, 1.0)
    tl.store(out + (sequence * HEADS + head) * DIM + dims, result.to(out.dtype.element_ty), mask=dims < DIM)


def plan_decode(
    plan: DecodePlan, context_tokens: torch.Tensor, *, contexts: Sequence[int] | None = None, gpu: Gpu | None = None
) -> None:
    """Fill `plan` with the splits of these contexts [sequences] int32. Once per step: all layers share it.

    Splits beyond the plan's room would be read from outside its memory. `contexts` are the same values on the host:
    raises ValueError if they have more splits than the plan has room. Without them, as under a graph, the caller must
    have checked with `splits_of`.
    """
    gpu = gpu or gpu_of(context_tokens.device)
    sequences = plan.first_splits.shape[0] - 1
    if contexts is not None:
        splits, room = splits_of(contexts, window=plan.window), plan.splits.shape[0]
        require(splits <= room, f"these contexts have {splits} splits and the plan has room for {room}")
    require_shape("context_tokens", context_tokens, (sequences,))
    arguments = (context_tokens, plan.splits, plan.first_splits, sequences, plan.splits.shape[0])
    constants = {
        "TILE": max(16, triton.next_power_of_2(sequences)),
        "SPLIT": SPLIT_TOKENS,
        "WINDOW": plan.window or 0,
    }
    gpu.start(Launch(_plan, (sequences,), arguments, constants))


def paged_decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    *,
    tables: torch.Tensor,
    context_tokens: torch.Tensor,
    plan: DecodePlan,
    scales: torch.Tensor | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gpu: Gpu | None = None,
) -> torch.Tensor:
    """The result of `paged_decode_reference` with the plan's window. Raises ValueError for other shapes.

    `plan_decode` has filled `plan` from the same context_tokens. A sequence's [heads, dim] in query is contiguous.
    The result is written to `out` if that is given: contiguous memory of the same shape.
    """
    gpu = gpu or gpu_of(query.device)
    require_layer(kv, scales, gpu)
    _require_matching(query, kv, tables, context_tokens, plan)
    require_sinks(sinks, query.shape[1])
    (sequences, heads, dim), kv_heads = query.shape, kv.shape[2]
    out = query.new_empty(query.shape) if out is None else out
    require(out.shape == query.shape and out.is_contiguous(), "out is not contiguous, or not like query")
    # two pages in flight while one is processed, and as many concurrent programs as the remaining memory allows
    page = page_bytes(kv, kv.element_size())
    buffers = gpu.chip.fits(page, most=2)
    # quantised KV takes up to 255 registers a thread, with which no more than two programs of 4 warps run at a time
    beside = gpu.chip.fits(buffers * page, most=4 if scales is None else 2)
    group = heads // kv_heads
    rows = max(LEAST_ROWS, triton.next_power_of_2(group))
    constants = constants_of(kv, group=group, rows=rows, window=plan.window, is_quantised=scales is not None)
    arguments = (
        *(query, kv, scales, sinks, tables, context_tokens),
        *(plan.splits, plan.first_splits, plan.partial, plan.logsumexp, out),
        *(sequences, query.stride(0), tables.stride(0), *strides(kv, scales), score_scale(dim, scale)),
    )
    grid = (gpu.processors * beside,)
    constants |= {"SPLIT": SPLIT_TOKENS}
    gpu.start(Launch(_attend_to_splits, grid, arguments, constants, warps=4, stages=buffers + 1))
    merged = {
        "HEADS": heads,
        "DIM": dim,
        "DIM_TILE": constants["DIM_TILE"],
        "TILE": MERGED_AT_ONCE // constants["DIM_TILE"],
    }
    arguments = (plan.partial, plan.logsumexp, plan.first_splits, out)
    gpu.start(Launch(_merge_splits, (sequences, heads), arguments, merged, warps=1))
    return out


def _require_matching(
    query: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, context_tokens: torch.Tensor, plan: DecodePlan
) -> None:
    sequences, heads, dim = query.shape
    require(dim == kv.shape[4], f"queries have {dim} dimensions and keys {kv.shape[4]}")
    require(heads % kv.shape[2] == 0, f"{heads} heads are no groups of {kv.shape[2]} kv heads")
    require(query.stride()[1:] == (dim, 1), "a sequence's heads in query are not in one piece")
    require_shape("context_tokens", context_tokens, (sequences,))
    require_shape("tables", tables, (sequences, tables.shape[-1]))
    require(tables.stride(1) == 1, "a table is not in one piece")
    require_shape("the plan's sums", plan.first_splits, (sequences + 1,))
    require_shape("the plan's room", plan.partial, (plan.splits.shape[0], heads, dim))
