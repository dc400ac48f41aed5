"""Attention of a chunk of new tokens per sequence over its pages, causal.

A tile of tokens is the work of one program, except where few tiles have long contexts: there would be fewer programs
than a GPU runs at a time, so a tile's context is cut into parts, which are merged afterwards.
"""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
import triton
import triton.language as tl

from shards.kernels.cache import BLOCK_TOKENS, require_layer, strides
from shards.kernels.gather_pages import gather_pages_reference
from shards.kernels.launch import Gpu, Launch, gpu_of, require, require_shape
from shards.kernels.paged import attend_to_page, begin, constants_of, page_bytes, require_sinks, score_scale

# Rows and warps of a program on heads of up to 128 dimensions. On an H100 4 warps compute 444 TFLOP/s and 8 warps 354:
# a processor then runs two programs, one multiplies during the softmax of the other, and that is worth some 200 bytes
# of spilled registers a thread. Elsewhere, the most rows that spill none (tests/shards/kernels prints the table).
# Hopper's matrix unit takes 64 rows of 4 warps; AMD's warps are twice as wide.
TILES = {"sm_90": (128, 4), "sm_100": (128, 8), "gfx942": (128, 4)}
OTHER_TILES = (64, 8)

# No matrix unit multiplies float32 exactly, and operands of other units must be in registers.
FLOAT32_TILE = (16, 4)
MOST_ROWS = 128

# Programs that a processor runs at a time, on an H100.
BESIDE = 2

# Tiles are cut into so many parts at most that all processors are busy so many times.
MOST_ROUNDS = 4

# A part has at least so many pages: 16 take some 20 us. Its start, and its result, which is written and read again,
# take as long as some more.
LEAST_PAGES, PART_PAGES = 16, 4

# Rows of a tile that one program merges, and parts that it reads at a time.
MERGED_ROWS, MERGED_PARTS = 16, 4


@dataclass(frozen=True, slots=True)
class Tile:
    """The work of one program: `rows` queries; for each token, the `group` heads that share a KV head."""

    rows: int
    warps: int
    group: int

    @classmethod
    def of(cls, gpu: Gpu, *, group: int, dim: int, dtype: torch.dtype) -> Tile:
        """The tile for queries of `dtype` with heads of `dim`. It depends on neither batch nor context.

        Raises ValueError if a group has more heads than a tile has rows.
        """
        rows, warps = TILES.get(gpu.chip.name, OTHER_TILES)
        if dim > 128:
            rows = rows * 128 // triton.next_power_of_2(dim)
        if dtype == torch.float32:
            rows, warps = max(FLOAT32_TILE[0], triton.next_power_of_2(group)), FLOAT32_TILE[1]
        require(group <= rows <= MOST_ROWS, f"a group of {group} heads does not fit into {min(rows, MOST_ROWS)} rows")
        return cls(rows, warps, group)

    @property
    def tokens(self) -> int:
        """The most tokens that one program computes."""
        return self.rows // self.group


def tiles_at_once(gpu: Gpu, *, kv_heads: int) -> int:
    """The number of tiles, or parts of tiles, that `gpu` computes at a time."""
    return max(1, BESIDE * gpu.processors // kv_heads)


def most_cut(at_once: int) -> int:
    """The most parts of tiles in a step, if so many are computed at a time."""
    return MOST_ROUNDS * at_once


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The work of each program of a step, on the GPU; all layers share it.

    first_queries [sequences + 1] are running sums of the new tokens; context_tokens [sequences] include the new ones;
    tiles [tiles, sequence|first new token|part|parts]: from there a program takes as many tokens as `tile` has rows for
    their heads, and none behind the last one, and of their context one of so many parts. The parts of a tile are
    neighbours, and tiles with several are among the first `cut` entries. All int32. The result is 0 for tokens of a
    sequence without a context, and for sequences without tiles it is not written.
    """

    first_queries: torch.Tensor
    context_tokens: torch.Tensor
    tiles: torch.Tensor
    tile: Tile
    cut: int = 0


def paged_prefill_reference(
    query: torch.Tensor,
    kv: torch.Tensor,
    *,
    tables: torch.Tensor,
    plan: PrefillPlan,
    window: int | None = None,
    scales: torch.Tensor | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each new token over its context up to itself. The reference for `paged_prefill`.

    Shapes: query [tokens, heads, dim], the last positions of each sequence's context, one sequence after the other; kv
    and scales are one layer of the cache, as in `require_layer`, with the new tokens written; tables [sequences,
    pages] block ids, int32; returned like query. A token sees the last `window` positions, including its own, or all.
    Scores are multiplied by `scale`, or else by 1 / sqrt(dim); `sinks` [heads] are scores of one more position, without
    a value. Heads of a group are neighbours. All in float32, rounded once.
    """
    out = torch.zeros_like(query)
    bounds = plan.first_queries.tolist()
    for sequence, context in enumerate(plan.context_tokens.tolist()):
        rows = slice(bounds[sequence], bounds[sequence + 1])
        shared = {"tokens": context, "dtype": torch.float32, "scales": scales}
        key, value = gather_pages_reference(kv, tables[sequence], **shared)
        grouped = (
            query[rows].float().reshape(rows.stop - rows.start, key.shape[0], -1, key.shape[2]).permute(1, 2, 0, 3)
        )
        scores = grouped @ key.mT[:, None] * (key.shape[2] ** -0.5 if scale is None else scale)
        unseen = ~visible(rows.stop - rows.start, context, window=window, device=query.device)
        scores = scores.masked_fill(unseen, -math.inf)
        if sinks is not None:
            sunk = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sunk], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :context]
        out[rows] = (weights @ value[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
    return out


def visible(new_tokens: int, context_tokens: int, *, window: int | None, device: torch.device) -> torch.Tensor:
    """The positions that each of the last `new_tokens` sees: bool [new_tokens, context_tokens]."""
    position = torch.arange(context_tokens - new_tokens, context_tokens, device=device)[:, None]
    past = position - torch.arange(context_tokens, device=device)
    return (past >= 0) & (past < (window or context_tokens))


def plan_prefill(
    new_tokens: Sequence[int],
    context_tokens: Sequence[int],
    *,
    tile: Tile,
    device: torch.device,
    at_once: int | None = None,
) -> PrefillPlan:
    """A plan for sequences with `new_tokens` new tokens each, at the end of `context_tokens` of context.

    `at_once` is that of `tiles_of`. Raises ValueError for more new tokens than context.
    """
    found = tiles_of(new_tokens, context_tokens, tile=tile, at_once=at_once)
    sums = [sum(new_tokens[:end]) for end in range(len(new_tokens) + 1)]
    first_queries, contexts, tiles = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (sums, list(context_tokens), found)
    )
    return PrefillPlan(first_queries, contexts, tiles, tile, cut_of(found))


TilePart = tuple[int, int, int, int]
"""A row of a plan's tiles: sequence, first new token, part, and parts."""


def tiles_of(
    new_tokens: Sequence[int], context_tokens: Sequence[int], *, tile: Tile, at_once: int | None = None
) -> list[TilePart]:
    """The tiles of `plan_prefill`, the longest first. Raises ValueError for more new tokens than context.

    Long contexts are cut where that keeps the GPU busier, which computes `at_once` tiles at a time; None cuts nothing.
    """
    pairs = list(zip(new_tokens, context_tokens, strict=True))
    for new, context in pairs:
        require(0 < new <= context, f"{new} new tokens in a context of {context}")
    starts = [
        (context - new + min(at + tile.tokens, new), sequence, at)
        for sequence, (new, context) in enumerate(pairs)
        for at in range(0, new, tile.tokens)
    ]
    # otherwise the longest would run alone at the end
    starts.sort(key=itemgetter(0), reverse=True)
    pages = [triton.cdiv(seen, BLOCK_TOKENS) for seen, _, _ in starts]
    most = max(pages, default=1) if at_once is None or not pages else _pages_of_a_part(pages, at_once)
    counts = [triton.cdiv(number, most) for number in pages]
    return [
        (sequence, at, part, count)
        for (_, sequence, at), count in zip(starts, counts, strict=True)
        for part in range(count)
    ]


def _pages_of_a_part(pages: Sequence[int], at_once: int) -> int:
    """The most pages of a part, for tiles with so many pages, the largest first: by the time that all would take."""
    best, best_time = pages[0], triton.cdiv(len(pages), at_once) * pages[0]
    for parts in range(2, most_cut(at_once) + 1):
        most = max(LEAST_PAGES, triton.cdiv(pages[0], parts))
        counts = [triton.cdiv(number, most) for number in pages]
        if sum(count for count in counts if count > 1) > most_cut(at_once):
            break
        time = triton.cdiv(sum(counts), at_once) * (most + PART_PAGES)
        if time < best_time:
            best, best_time = most, time
        if most == LEAST_PAGES:
            break
    return best


def cut_of(tiles: Sequence[TilePart]) -> int:
    """The number of first entries with all tiles that have several parts."""
    return sum(parts > 1 for _, _, _, parts in tiles)


@triton.jit
def _attend(
    carried,
    q,
    tables,
    page,
    kv,
    scales,
    newest,
    last,
    kv_block,
    kv_side,
    scales_block,
    scales_side,
    score_scale,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    QUANTISED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`attend_to_page` for one page of the table. `newest` [rows] is the last position that each row sees, `last` the
    largest of them.
    """
    dims = tl.arange(0, DIM_TILE)
    offsets = tl.arange(0, BLOCK)
    # int64 before multiplying: in an 8B model block 512 is already 2**31 elements away
    block = tl.load(tables + page).to(tl.int64)
    positions = page * BLOCK + offsets
    seen = positions[None, :] <= newest[:, None]
    if WINDOW > 0:
        seen = seen & (positions[None, :] > newest[:, None] - WINDOW)
    at = kv + block * kv_block + offsets[:, None] * DIM + dims[None, :]
    scales_at = scales
    if QUANTISED:
        scales_at = scales + block * scales_block + offsets
    return attend_to_page(
        carried, q, at, scales_at, positions <= last, seen, kv_side, scales_side, score_scale,
        DIM, DIM_TILE, QUANTISED, MASKED,
    )  # fmt: skip


@triton.jit
def _seen_pages(before, start, new_tokens, TOKENS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """The pages that the tokens of a tile see, from the first to before the end; `before` old tokens come first."""
    # a sequence without a context has no page, and its positions are negative
    end = tl.maximum(tl.cdiv(before + tl.minimum(start + TOKENS, new_tokens), BLOCK), 0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(before + start + 1 - WINDOW, 0) // BLOCK
    return first, end


# tables are as wide as the longest context of a step: one compilation serves all widths
@triton.jit(do_not_specialize=["table_length"])
def _paged_prefill(
    query,
    kv,
    scales,
    sinks,
    tables,
    first_queries,
    context_tokens,
    tiles,
    out,
    partial,
    logsumexp,
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
    WINDOW: tl.constexpr,
    QUANTISED: tl.constexpr,
    LEAST: tl.constexpr,
    CUT: tl.constexpr,
):
    tile = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(tiles + 4 * tile).to(tl.int64)
    start = tl.load(tiles + 4 * tile + 1)
    first_query = tl.load(first_queries + sequence)
    new_tokens = tl.load(first_queries + sequence + 1) - first_query
    context = tl.load(context_tokens + sequence)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_TILE)
    # row r is head r % GROUP of token r // GROUP: a page is read once for all heads that share it
    tokens: tl.constexpr = ROWS // GROUP
    token = start + rows // GROUP
    in_tile = ((rows < tokens * GROUP) & (token < new_tokens))[:, None] & (dims < DIM)[None, :]
    # int64 before multiplying: 600,000 tokens of 32 heads of 128 pass 2**31
    at_token = (first_query + token).to(tl.int64)[:, None]
    at_row = (head * GROUP + rows % GROUP)[:, None] * DIM + dims[None, :]
    q = tl.load(query + at_token * query_token + at_row, mask=in_tile, other=0.0)
    # rows without a token see the same positions as the last token
    newest = context - new_tokens + tl.minimum(token, tl.minimum(start + tokens, new_tokens) - 1)
    last = tl.max(newest, axis=0)
    first, end = _seen_pages(context - new_tokens, start, new_tokens, tokens, BLOCK, WINDOW)
    unmasked_end = tl.minimum(tl.maximum(context - new_tokens + start + 1, 0) // BLOCK, end)
    if WINDOW > 0:
        unmasked_end = first
    part = 0
    is_whole = True
    if CUT:
        part = tl.load(tiles + 4 * tile + 2)
        pages = tl.maximum(tl.cdiv(end - first, tl.load(tiles + 4 * tile + 3)), LEAST)
        is_whole = end - first <= pages
        first += part * pages
        end = tl.minimum(first + pages, end)
        unmasked_end = tl.maximum(tl.minimum(unmasked_end, end), first)
    kv += head * kv_head
    if QUANTISED:
        scales += head * scales_head
    tables += sequence * table_length
    carried = begin(sinks, head * GROUP + rows % GROUP, rows < ROWS, part == 0, score_scale, ROWS, DIM_TILE)
    for page in range(first, unmasked_end):
        carried = _attend(
            carried, q, tables, page, kv, scales, newest, last, kv_block, kv_side, scales_block, scales_side,
            score_scale, DIM, DIM_TILE, BLOCK, WINDOW, QUANTISED, False,
        )  # fmt: skip
    for page in range(unmasked_end, end):
        carried = _attend(
            carried, q, tables, page, kv, scales, newest, last, kv_block, kv_side, scales_block, scales_side,
            score_scale, DIM, DIM_TILE, BLOCK, WINDOW, QUANTISED, True,
        )  # fmt: skip
    # a row may see nothing of its part
    total = tl.where(carried[1] > 0, carried[1], 1.0)
    result = carried[2] / total[:, None]
    if is_whole:
        # a window leaves less to cut, so there may be parts without pages
        if part == 0:
            at = at_token * (KV_HEADS * GROUP * DIM) + at_row
            tl.store(out + at, result.to(out.dtype.element_ty), mask=in_tile)
    else:
        at_part = tl.program_id(0) * ROWS + rows
        tl.store(partial + at_part[:, None] * DIM + dims[None, :], result, mask=(dims < DIM)[None, :])
        tl.store(logsumexp + at_part, carried[0] * score_scale + tl.log2(total))


@triton.jit
def _merge_parts(
    partial,
    logsumexp,
    first_queries,
    context_tokens,
    tiles,
    out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
):
    tile = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    tokens: tl.constexpr = ROWS // GROUP
    sequence = tl.load(tiles + 4 * tile).to(tl.int64)
    start = tl.load(tiles + 4 * tile + 1)
    first_query = tl.load(first_queries + sequence)
    new_tokens = tl.load(first_queries + sequence + 1) - first_query
    before = tl.load(context_tokens + sequence) - new_tokens
    first, end = _seen_pages(before, start, new_tokens, tokens, BLOCK, WINDOW)
    pages = tl.maximum(tl.cdiv(end - first, tl.load(tiles + 4 * tile + 3)), LEAST)
    # the program of a tile's first part merges all of them; a single one has written its result itself
    if tl.load(tiles + 4 * tile + 2) > 0 or end - first <= pages:
        return
    parts = tl.cdiv(end - first, pages)
    rows = tl.program_id(1) * MERGED_ROWS + tl.arange(0, MERGED_ROWS)
    dims = tl.arange(0, DIM_TILE)
    highest = tl.full([MERGED_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGED_ROWS], tl.float32)
    result = tl.zeros([MERGED_ROWS, DIM_TILE], tl.float32)
    for done in range(0, parts, MERGED_PARTS):
        part = done + tl.arange(0, MERGED_PARTS)
        at = ((tile + part) * KV_HEADS + head)[:, None] * ROWS + rows[None, :]
        sums = tl.load(logsumexp + at, mask=(part < parts)[:, None], other=float("-inf"))
        mask = (part < parts)[:, None, None] & (dims < DIM)[None, None, :]
        values = tl.load(partial + at[:, :, None] * DIM + dims[None, None, :], mask=mask, other=0.0)
        higher = tl.maximum(highest, tl.max(sums, axis=0))
        # the first parts of a window may have nothing that a row sees
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(sums - finite[None, :])
        fading = tl.exp2(highest - finite)
        total = total * fading + tl.sum(weights, axis=0)
        result = result * fading[:, None] + tl.sum(weights[:, :, None] * values, axis=0)
        highest = higher
    token = start + rows // GROUP
    is_there = (rows < tokens * GROUP) & (token < new_tokens)
    at_token = (first_query + token).to(tl.int64)[:, None]
    at = (at_token * (KV_HEADS * GROUP) + (head * GROUP + rows % GROUP)[:, None]) * DIM + dims[None, :]
    merged = (result / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at, merged, mask=is_there[:, None] & (dims < DIM)[None, :])


def paged_prefill(
    query: torch.Tensor,
    kv: torch.Tensor,
    *,
    tables: torch.Tensor,
    plan: PrefillPlan,
    window: int | None = None,
    scales: torch.Tensor | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gpu: Gpu | None = None,
) -> torch.Tensor:
    """The result of `paged_prefill_reference`. Raises ValueError for other shapes.

    A token's [heads, dim] in query is contiguous.
    The result is written to `out` if that is given: contiguous memory of the same shape.
    """
    gpu = gpu or gpu_of(query.device)
    require_layer(kv, scales, gpu)
    require_prefill(query, kv, tables, plan)
    require_sinks(sinks, query.shape[1])
    dim, kv_heads = query.shape[2], kv.shape[2]
    out = query.new_empty(query.shape) if out is None else out
    require(out.shape == query.shape and out.is_contiguous(), "out is not contiguous, or not like query")
    tile = plan.tile
    constants = constants_of(kv, group=tile.group, rows=tile.rows, window=window, is_quantised=scales is not None)
    constants |= {"LEAST": LEAST_PAGES, "CUT": plan.cut > 0}
    per_row = plan.cut, kv_heads, tile.rows
    partial, logsumexp = (query.new_empty(shape, dtype=torch.float32) for shape in ((*per_row, dim), per_row))
    arguments = (
        *(query, kv, scales, sinks, tables, plan.first_queries, plan.context_tokens, plan.tiles, out),
        *(partial, logsumexp),
        *(query.stride(0), tables.stride(0), *strides(kv, scales), score_scale(dim, scale)),
    )
    grid = (plan.tiles.shape[0] * kv_heads,)
    # loading the page's id takes a stage too
    stages = 1 + gpu.chip.fits(page_bytes(kv, query.element_size()), most=2)
    gpu.start(Launch(_paged_prefill, grid, arguments, constants, warps=tile.warps, stages=stages))
    merged = {name: value for name, value in constants.items() if name not in ("QUANTISED", "CUT")}
    merged |= {"MERGED_ROWS": MERGED_ROWS, "MERGED_PARTS": MERGED_PARTS}
    parts = (partial, logsumexp, plan.first_queries, plan.context_tokens, plan.tiles, out)
    gpu.start(Launch(_merge_parts, (plan.cut * kv_heads, tile.rows // MERGED_ROWS), parts, merged))
    return out


def require_prefill(query: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, plan: PrefillPlan) -> None:
    """Raise ValueError unless these shapes fit together, as `paged_prefill_reference` requires."""
    heads, dim = query.shape[1:]
    require(dim == kv.shape[4], f"queries have {dim} dimensions and keys {kv.shape[4]}")
    require(heads == kv.shape[2] * plan.tile.group, f"{heads} heads are not {kv.shape[2]} groups of {plan.tile.group}")
    require(query.stride()[1:] == (dim, 1), "a token's heads in query are not in one piece")
    require_shape("tables", tables, (plan.context_tokens.shape[0], tables.shape[-1]))
    require(tables.stride(1) == 1, "a table is not in one piece")
