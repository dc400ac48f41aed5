"""Attention of one new token per sequence over its pages, cut into splits of one fixed size.

The size of a split does not depend on the batch, so a result does not either: alone and beside 63 others it is the
same, bit for bit. A fixed number of programs takes items from a list that is made on the GPU: the launch is the same
for every batch, as CUDA graphs require, and one context of 128k beside many short ones keeps all processors busy.

An item is a split and its readers: a sequence, or several with the same pages there. The matrix units multiply 16 rows
in any case, and a sequence has only as many as query heads share a KV head.
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

# Items that one program plans at once: 32k tokens of a sequence.
PLANNED_AT_ONCE = 64

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
class SharedSplits:
    """The splits that sequences of a step have in common, on the GPU: int32, with as many rows as there are sequences.

    spans [sequences, first|end|place|count]: the `count` sequences from `place` on in readers [sequences] have the same
    pages in the splits from `first` to before `end`; a span without readers is padding. own [sequences] is the first
    split that a sequence reads alone, which is never behind its last one: so a split that is shared is not the only
    one of any reader, and all of its positions are seen.
    """

    spans: torch.Tensor
    readers: torch.Tensor
    own: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The splits of one step, on the GPU, and room for their results. Made once, refilled by `plan_decode`.

    items [capacity, split|readers...] int32, of which the first `item_count` [1] are there, with -1 for readers that an
    item does not have. first_splits [sequences + 1] int32, running sums of the splits per sequence, and so the place of
    their results: partial [capacity, heads, dim] and logsumexp [capacity, heads] (base 2), float32.
    """

    items: torch.Tensor
    item_count: torch.Tensor
    first_splits: torch.Tensor
    partial: torch.Tensor
    logsumexp: torch.Tensor
    window: int | None

    @classmethod
    def with_room(
        cls,
        sequences: int,
        splits: int,
        *,
        heads: int,
        dim: int,
        device: torch.device,
        window: int | None = None,
        readers: int = 1,
    ) -> DecodePlan:
        """An empty plan for exactly `sequences` and at most `splits`, as `splits_of` counts them, with at most
        `readers` each; more than `most_readers` take larger tiles.
        """
        return cls(
            items=torch.empty(splits, 1 + readers, dtype=torch.int32, device=device),
            item_count=torch.empty(1, dtype=torch.int32, device=device),
            first_splits=torch.empty(sequences + 1, dtype=torch.int32, device=device),
            partial=torch.empty(splits, heads, dim, dtype=torch.float32, device=device),
            logsumexp=torch.empty(splits, heads, dtype=torch.float32, device=device),
            window=window,
        )


def most_readers(group: int) -> int:
    """The sequences that fill a tile together, if `group` query heads share a KV head."""
    return max(1, LEAST_ROWS // group)


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
    spans,
    readers,
    own,
    items,
    item_count,
    first_splits,
    sequences,
    capacity,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    READERS: tl.constexpr,
    READER_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    # its items: first those of span number `sequence`, then those that the sequence reads alone
    sequence = tl.program_id(0)
    others = tl.arange(0, TILE)
    contexts = tl.load(context_tokens + others, mask=others < sequences, other=0)
    ends = tl.cdiv(contexts, SPLIT)
    oldest = tl.zeros_like(contexts)
    if WINDOW > 0:
        oldest = tl.maximum(contexts - WINDOW, 0) // SPLIT
    alone = oldest
    together = tl.zeros_like(contexts)
    if spans is not None:
        alone = tl.load(own + others, mask=others < sequences, other=0)
        firsts = tl.load(spans + 4 * others, mask=others < sequences, other=0)
        behind = tl.load(spans + 4 * others + 1, mask=others < sequences, other=0)
        counts = tl.load(spans + 4 * others + 3, mask=others < sequences, other=0)
        together = (behind - firsts) * tl.cdiv(counts, READERS)
    before = others < sequence
    this = others == sequence
    first_split = tl.sum(tl.where(before, ends - oldest, 0), axis=0)
    split_count = tl.sum(tl.where(this, ends - oldest, 0), axis=0)
    first = tl.sum(tl.where(before, together + ends - alone, 0), axis=0)
    shared_count = tl.sum(tl.where(this, together, 0), axis=0)
    own_count = tl.sum(tl.where(this, ends - alone, 0), axis=0)
    tl.store(first_splits + sequence, first_split)
    if sequence == sequences - 1:
        tl.store(first_splits + sequences, first_split + split_count)
        tl.store(item_count, first + shared_count + own_count)
    columns = tl.arange(0, READER_TILE)
    if spans is not None:
        split = tl.load(spans + 4 * sequence)
        place = tl.load(spans + 4 * sequence + 2)
        count = tl.load(spans + 4 * sequence + 3)
        tiles = tl.maximum(tl.cdiv(count, READERS), 1)
        for start in range(0, shared_count, AT_ONCE):
            # tiles of one split are neighbours: the first brings its pages into the cache for the others
            i = start + tl.arange(0, AT_ONCE)
            mask = (i < shared_count) & (first + i < capacity)
            nth = (i % tiles)[:, None] * READERS + columns[None, :]
            in_item = mask[:, None] & (columns < READERS)[None, :]
            row = tl.load(readers + place + nth, mask=in_item & (nth < count), other=-1)
            at_item = items + (first + i) * (READERS + 1)
            tl.store(at_item, split + i // tiles, mask=mask)
            tl.store(at_item[:, None] + 1 + columns[None, :], row, mask=in_item)
    first += shared_count
    split = tl.sum(tl.where(this, alone, 0), axis=0)
    for start in range(0, own_count, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        mask = (i < own_count) & (first + i < capacity)
        row = tl.where(columns == 0, sequence, -1)[None, :] + tl.zeros_like(i)[:, None]
        at_item = items + (first + i) * (READERS + 1)
        tl.store(at_item, split + i, mask=mask)
        tl.store(at_item[:, None] + 1 + columns[None, :], row, mask=mask[:, None] & (columns < READERS)[None, :])


@triton.jit(do_not_specialize=["table_length"])
def _attend_to_splits(
    query,
    kv,
    scales,
    sinks,
    tables,
    context_tokens,
    items,
    item_count,
    first_splits,
    partial,
    logsumexp,
    out,
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
    READERS: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_TILE)
    offsets = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), tl.load(item_count) * KV_HEADS, tl.num_programs(0)):
        at_item = items + item // KV_HEADS * (READERS + 1)
        head = item % KV_HEADS
        split = tl.load(at_item)
        # its readers are alike in all that the split needs
        sequence = tl.load(at_item + 1).to(tl.int64)
        # int64 before multiplying: splits * heads * dim pass 2**31 where many sequences share a long prefix
        reader = tl.load(at_item + 1 + rows // GROUP, mask=rows < READERS * GROUP, other=-1).to(tl.int64)
        is_read = reader >= 0
        context = tl.load(context_tokens + sequence)
        start = split * SPLIT
        end = tl.minimum(start + SPLIT, context)
        oldest = 0
        if WINDOW > 0:
            start = tl.maximum(start, context - WINDOW)
            oldest = tl.maximum(context - WINDOW, 0) // SPLIT
        heads = head * GROUP + rows % GROUP
        in_tile = is_read[:, None] & (dims < DIM)[None, :]
        at_query = query + (reader * query_token + heads * DIM)[:, None] + dims[None, :]
        q = tl.load(at_query, mask=in_tile, other=0.0)
        carried = begin(sinks, heads, is_read, split == oldest, score_scale, ROWS, DIM_TILE)
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
            at_out = out + (reader * (KV_HEADS * GROUP * DIM) + heads * DIM)[:, None] + dims[None, :]
            tl.store(at_out, result.to(out.dtype.element_ty), mask=in_tile)
        else:
            at_split = tl.load(first_splits + reader, mask=is_read, other=0).to(tl.int64) + (split - oldest)
            at_rows = at_split * (KV_HEADS * GROUP) + heads
            tl.store(partial + at_rows[:, None] * DIM + dims[None, :], result, mask=in_tile)
            tl.store(logsumexp + at_rows, carried[0] * score_scale + tl.log2(carried[1]), mask=is_read)


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
    plan: DecodePlan,
    context_tokens: torch.Tensor,
    *,
    shared: SharedSplits | None = None,
    contexts: Sequence[int] | None = None,
    gpu: Gpu | None = None,
) -> None:
    """Fill `plan` with the splits of these contexts [sequences] int32. Once per step: all layers share it.

    `shared` splits are read once for several sequences, which changes no bit of the result; a plan with a window has
    none. Splits beyond the plan's room would be read from outside its memory. `contexts` are the same values on the
    host: raises ValueError if they have more splits than the plan has room. Without them, as under a graph, the caller
    must have checked with `splits_of`.
    """
    gpu = gpu or gpu_of(context_tokens.device)
    sequences, (room, words) = plan.first_splits.shape[0] - 1, plan.items.shape
    if contexts is not None:
        splits = splits_of(contexts, window=plan.window)
        require(splits <= room, f"these contexts have {splits} splits and the plan has room for {room}")
    require_shape("context_tokens", context_tokens, (sequences,))
    given: tuple[torch.Tensor | None, ...] = (None, None, None)
    if shared is not None:
        require(plan.window is None, "a plan with a window shares no splits")
        require_shape("spans", shared.spans, (sequences, 4))
        require_shape("readers", shared.readers, (sequences,))
        require_shape("own", shared.own, (sequences,))
        given = (shared.spans, shared.readers, shared.own)
    arguments = (context_tokens, *given, plan.items, plan.item_count, plan.first_splits, sequences, room)
    constants = {
        "TILE": max(16, triton.next_power_of_2(sequences)),
        "SPLIT": SPLIT_TOKENS,
        "WINDOW": plan.window or 0,
        "READERS": words - 1,
        "READER_TILE": triton.next_power_of_2(words - 1),
        "AT_ONCE": PLANNED_AT_ONCE,
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
    group, readers = heads // kv_heads, plan.items.shape[1] - 1
    rows = max(LEAST_ROWS, triton.next_power_of_2(readers * group))
    # quantised KV and larger tiles take up to 255 registers a thread: no more than two programs of 4 warps at a time
    beside = gpu.chip.fits(buffers * page, most=4 if scales is None and rows <= 16 else 2)
    constants = constants_of(kv, group=group, rows=rows, window=plan.window, is_quantised=scales is not None)
    arguments = (
        *(query, kv, scales, sinks, tables, context_tokens),
        *(plan.items, plan.item_count, plan.first_splits, plan.partial, plan.logsumexp, out),
        *(query.stride(0), tables.stride(0), *strides(kv, scales), score_scale(dim, scale)),
    )
    grid = (gpu.processors * beside,)
    constants |= {"SPLIT": SPLIT_TOKENS, "READERS": readers}
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
    require_shape("the plan's room", plan.partial, (plan.items.shape[0], heads, dim))
