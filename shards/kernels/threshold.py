"""The least logit that each row may draw, from top-k, top-p and min-p: exact, in several programs for each row.

A row is read four times, whatever is asked for: once for its highest logit and its mass, twice to narrow the interval
with the threshold to an 81st, and once to gather the logits in that interval, of which one program finds the threshold.
The sums of a tile are kept apart and added in the order of tiles, so a row's threshold depends on that row alone: not
on its neighbours, nor on how many programs read it. Rows without top-k, top-p and min-p are not read.
"""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl

from shards.kernels.adjust import adjust_reference, adjusted, is_adjusted
from shards.kernels.draw import Draw
from shards.kernels.launch import Gpu, Launch, gpu_of, require

MOST_TILE = 4096
"""Tokens of a tile, which has sums of its own."""

MEASURED, SETTLED = 512, 1024
"""Tokens that a program compares at a time: with all pivots, and with one interval."""

STAGES = 2
"""How often an interval is measured."""

PROGRAMS_BESIDE = 4
"""Programs that one multiprocessor gets: as many as run at a time."""

GATHERED = 16
"""The interval of a row may have one in so many of its tokens: a normal distribution of logits has one in 23 in an
81st of its range. Where it has more, one program reads the whole row instead.
"""

BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""The bits of float32, from the top, by which numbers of a type differ."""

_PIVOTS = tl.constexpr(8)
_STATE = tl.constexpr(11)
"""Of a row: its highest logit, the number or mass that its interval must leave, and three intervals, each with the
sum above it.
"""

_ONE = tl.constexpr(float(2**40))
"""The mass of the highest logit as an integer: sums of integers do not depend on their order."""

_LEAST = tl.constexpr(-1.0e30)
"""In place of -inf, from which -inf cannot be subtracted."""

_LOG2_E = tl.constexpr(1.4426950408889634)


def threshold_reference(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The least logit [rows] float32 that each row may draw. The reference for `threshold`.

    Shapes: logits [rows, vocabulary], float32, float16 or bfloat16. Of the tokens sorted by probability at the row's
    temperature: the first top_k; of those, the fewest that have top_p of their mass; and none less likely than min_p
    times the first. All ties are kept, and at least one token. -inf if nothing is on or the row is greedy.
    """
    out = torch.full(logits.shape[:1], -math.inf, dtype=torch.float32, device=logits.device)
    changed = adjust_reference(logits, draw.adjustments)
    for row, (wide, temperature) in enumerate(zip(changed, draw.temperature.tolist(), strict=True)):
        top_k, top_p, min_p = (x[row].item() for x in (draw.top_k, draw.top_p, draw.min_p))
        if temperature == 0:
            continue
        ordered = wide.sort(descending=True).values
        if 0 < top_k < len(ordered):
            ordered = ordered[ordered >= ordered[int(top_k) - 1]]
            out[row] = ordered[-1]
        if top_p < 1:
            mass = torch.softmax(ordered.double() / temperature, dim=0).cumsum(dim=0)
            out[row] = ordered[min(int((mass < top_p).sum()), len(ordered) - 1)]
        if min_p > 0:
            out[row] = torch.maximum(out[row], ordered[0] + temperature * math.log(min(min_p, 1.0)))
    return out


@triton.jit
def _in_order(wide):
    """float32 as uint32 of the same order; -0 becomes 0."""
    bits = (wide + 0.0).to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _of_order(key):
    """The float32 from which `_in_order` made `key`."""
    bits = key ^ tl.where(key >= 0x80000000, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _logits(row, at_row, token, vocabulary, rows, penalties, entries, biases, masks, entries_row, masks_row):
    """The logits of tokens `token` of a row, changed, in float32; -inf behind the last."""
    inside = token < vocabulary
    wide = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
    return adjusted(wide, token, inside, at_row, rows, penalties, entries, biases, masks, entries_row, masks_row)


@triton.jit
def _asked(temperature, top_k, top_p, at_row, vocabulary):
    """The temperature, k and p of a row, and whether it has top-k, and top-p."""
    heat = tl.load(temperature + at_row)
    k = tl.load(top_k + at_row)
    p = tl.load(top_p + at_row)
    return heat, k, p, (heat > 0) & (k > 0) & (k < vocabulary), (heat > 0) & (p < 1.0)


@triton.jit(do_not_specialize=["each"])
def _survey(
    logits, temperature, top_k, top_p, min_p, surveys, found, logits_row, vocabulary, tiles, each,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of each tile the highest logit, the lowest one that may be drawn, and the mass relative to the highest."""
    # int64 before multiplying: 20,000 rows of 128,256 pass 2**31
    at_row = tl.program_id(0).to(tl.int64)
    heat, _, _, by_k, by_p = _asked(temperature, top_k, top_p, at_row, vocabulary)
    if by_k | by_p | ((heat > 0) & (tl.load(min_p + at_row) > 0)):
        part = tl.program_id(1)
        if part == 0:
            tl.store(found + at_row, 0)
        scale = _LOG2_E / heat
        for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
            token = tile * TILE + tl.arange(0, TILE)
            wide = _logits(
                logits + at_row * logits_row, at_row, token, vocabulary,
                rows, penalties, entries, biases, masks, entries_row, masks_row,
            )  # fmt: skip
            highest = tl.maximum(tl.max(wide, axis=0), _LEAST)
            at = surveys + (at_row * tiles + tile) * 3
            tl.store(at, highest)
            tl.store(at + 1, tl.min(tl.where(wide > float("-inf"), wide, float("inf")), axis=0))
            tl.store(at + 2, tl.sum(tl.exp2((wide - highest) * scale), axis=0))


@triton.jit
def _highest(surveys, at_row, tiles, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(surveys + (at_row * tiles + tile) * 3, mask=tile < tiles, other=_LEAST), axis=0)


@triton.jit
def _first_interval(surveys, at_row, heat, k, p, by_k, vocabulary, tiles, TILES: tl.constexpr):
    """The interval [low, high) with the threshold, as far as a survey tells, the number or mass that it must leave, and
    the highest logit.
    """
    tile = tl.arange(0, TILES)
    at, inside = surveys + (at_row * tiles + tile) * 3, tile < tiles
    highs = tl.load(at, mask=inside, other=_LEAST)
    highest = tl.max(highs, axis=0)
    # inf if no token may be drawn
    low = tl.minimum(tl.min(tl.load(at + 1, mask=inside, other=float("inf")), axis=0), highest)
    masses = tl.load(at + 2, mask=inside, other=0.0)
    # the highest alone has 1
    total = tl.maximum(tl.sum(masses * tl.exp2((highs - highest) * (_LOG2_E / heat)), axis=0), 1.0)
    enough = k.to(tl.float32)
    if by_k == 0:
        enough = p * total
        # all tokens less likely than that have less than 1 - p of the mass together; 1 more is for rounding
        low = tl.maximum(low, highest - heat * (tl.log(vocabulary / ((1.0 - p) * total)) + 1.0))
    return low, _of_order(_in_order(highest) + 1), enough, highest


@triton.jit
def _step(low, high):
    """A ninth of an interval, which may be longer than the largest number, or empty."""
    return tl.maximum(tl.minimum(high - low, 3.0e38), 0.0) * 0.1111111111111111


@triton.jit
def _pivot(low, step, number):
    # rounding is fixed: the kernel that chooses an interval has to find the pivots of the kernel that measured it
    return tl.fma(step, number, low)


@triton.jit
def _narrowed(sums, at_row, low, high, above, enough, tiles, TILES: tl.constexpr):
    """The ninth of [low, high) with the threshold, and the sum above it; `sums` are those at its pivots."""
    pivot = tl.arange(0, _PIVOTS)
    tile = tl.arange(0, TILES)
    at = sums + (at_row * tiles + tile[:, None]) * _PIVOTS + pivot[None, :]
    total = tl.sum(tl.load(at, mask=(tile < tiles)[:, None], other=0.0), axis=0)
    passed = tl.sum((total >= enough).to(tl.int32), axis=0)
    step = _step(low, high)
    above = tl.where(passed < _PIVOTS, tl.sum(tl.where(pivot == passed, total, 0.0), axis=0), above)
    high = tl.where(passed < _PIVOTS, _pivot(low, step, (passed + 1).to(tl.float32)), high)
    low = tl.where(passed > 0, _pivot(low, step, passed.to(tl.float32)), low)
    return low, high, above


@triton.jit
def _interval(
    surveys, state, sums, at_row, heat, k, p, by_k, vocabulary, tiles,
    TILES: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """The interval of a stage, noted by the row's first program, and the highest logit."""
    state += at_row * _STATE
    if STAGE == 0:
        low, high, enough, highest = _first_interval(surveys, at_row, heat, k, p, by_k, vocabulary, tiles, TILES)
        above = 0.0
    else:
        highest = tl.load(state)
        enough = tl.load(state + 1)
        before = state + 3 * STAGE - 1
        sums += (STAGE - 1) * tl.num_programs(0).to(tl.int64) * tiles * _PIVOTS
        low, high, above = _narrowed(
            sums, at_row, tl.load(before), tl.load(before + 1), tl.load(before + 2), enough, tiles, TILES
        )
    if tl.program_id(1) == 0:
        if STAGE == 0:
            tl.store(state, highest)
            tl.store(state + 1, enough)
        tl.store(state + 3 * STAGE + 2, low)
        tl.store(state + 3 * STAGE + 3, high)
        tl.store(state + 3 * STAGE + 4, above)
    return low, high, highest


@triton.jit(do_not_specialize=["each"])
def _measure(
    logits, temperature, top_k, top_p, surveys, state, sums, logits_row, vocabulary, tiles, each,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    TILE: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Of each tile the number (top-k) or mass (top-p) of the logits that are not below each pivot of the interval."""
    # int64 before multiplying: see _survey
    at_row = tl.program_id(0).to(tl.int64)
    heat, k, p, by_k, by_p = _asked(temperature, top_k, top_p, at_row, vocabulary)
    if by_k | by_p:
        low, high, highest = _interval(surveys, state, sums, at_row, heat, k, p, by_k, vocabulary, tiles, TILES, STAGE)
        scale = _LOG2_E / heat
        step = _step(low, high)
        out = sums + (STAGE * tl.num_programs(0) + at_row) * tiles * _PIVOTS
        part = tl.program_id(1)
        for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
            one = tl.zeros([CHUNK], tl.float32)
            two, three, four, five, six, seven, eight = one, one, one, one, one, one, one
            for start in range(0, TILE, CHUNK):
                wide = _logits(
                    logits + at_row * logits_row, at_row, tile * TILE + start + tl.arange(0, CHUNK), vocabulary,
                    rows, penalties, entries, biases, masks, entries_row, masks_row,
                )  # fmt: skip
                # most have none: the likeliest tokens are few
                if tl.max(wide, axis=0) >= _pivot(low, step, 1.0):
                    weight = tl.where(by_k, 1.0, tl.exp2((wide - highest) * scale))
                    one += tl.where(wide >= _pivot(low, step, 1.0), weight, 0.0)
                    two += tl.where(wide >= _pivot(low, step, 2.0), weight, 0.0)
                    three += tl.where(wide >= _pivot(low, step, 3.0), weight, 0.0)
                    four += tl.where(wide >= _pivot(low, step, 4.0), weight, 0.0)
                    five += tl.where(wide >= _pivot(low, step, 5.0), weight, 0.0)
                    six += tl.where(wide >= _pivot(low, step, 6.0), weight, 0.0)
                    seven += tl.where(wide >= _pivot(low, step, 7.0), weight, 0.0)
                    eight += tl.where(wide >= _pivot(low, step, 8.0), weight, 0.0)
            # one sum of all: eight would wait for each other's exchange between warps
            odd = tl.join(tl.join(one, five), tl.join(three, seven))
            even = tl.join(tl.join(two, six), tl.join(four, eight))
            total = tl.reshape(tl.sum(tl.join(odd, even), axis=0), [_PIVOTS])
            tl.store(out + tile * _PIVOTS + tl.arange(0, _PIVOTS), total)


@triton.jit(do_not_specialize=["each"])
def _gather(
    logits, temperature, top_k, top_p, surveys, state, sums, found, gathered, room, logits_row, vocabulary, tiles, each,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    CHUNK: tl.constexpr, TILES: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Gather the logits of a row's interval in any order, as far as there is room, and count them in `found`.

    With top-p behind top-k all that are not below the interval, of which top-p then is. `each` counts tokens here.
    """
    # int64 before multiplying: see _survey
    at_row = tl.program_id(0).to(tl.int64)
    heat, k, p, by_k, by_p = _asked(temperature, top_k, top_p, at_row, vocabulary)
    if by_k | by_p:
        low, high, _ = _interval(surveys, state, sums, at_row, heat, k, p, by_k, vocabulary, tiles, TILES, STAGE)
        high = tl.where(by_k & by_p, float("inf"), high)
        part = tl.program_id(1)
        for start in range(part * each, tl.minimum((part + 1) * each, vocabulary), CHUNK):
            wide = _logits(
                logits + at_row * logits_row, at_row, start + tl.arange(0, CHUNK), vocabulary,
                rows, penalties, entries, biases, masks, entries_row, masks_row,
            )  # fmt: skip
            is_inside = (wide >= low) & (wide < high)
            count = tl.sum(is_inside.to(tl.int32), axis=0)
            if count > 0:
                begin = tl.atomic_add(found + at_row, count, sem="relaxed")
                place = begin + tl.cumsum(is_inside.to(tl.int32), axis=0) - 1
                tl.store(gathered + at_row * room + place, wide, mask=is_inside & (place < room))


@triton.jit
def _sums(
    row, at_row, vocabulary, gathered, size, is_whole, key, step, shift, highest, scale, by_mass,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    TILE: tl.constexpr,
):  # fmt: skip
    """The numbers or masses of the logits, gathered or of the whole row, that are not below `key` plus 1, 2 and 3 times
    `step`, in order and without their last `shift` bits.
    """
    one = tl.zeros([TILE], tl.int64)
    two, three = one, one
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        if is_whole:
            wide = _logits(row, at_row, at, vocabulary, rows, penalties, entries, biases, masks, entries_row, masks_row)
        else:
            wide = tl.load(gathered + at, mask=at < size, other=float("-inf"))
        order = _in_order(wide) >> shift
        weight = tl.full([TILE], 1, tl.int64)
        if by_mass:
            weight = (tl.exp2((wide - highest) * scale) * _ONE).to(tl.int64)
        one += tl.where(order >= key + step, weight, 0)
        two += tl.where(order >= key + 2 * step, weight, 0)
        three += tl.where(order >= key + 3 * step, weight, 0)
    return tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0)


@triton.jit
def _searched(
    key, end, above, enough,
    row, at_row, vocabulary, gathered, size, is_whole, shift, highest, scale, by_mass,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    TILE: tl.constexpr,
):  # fmt: skip
    """The largest key from `key` on and below `end` that leaves `enough` with `above`; `key` if none does."""
    width = end - key
    while width > 1:
        step = (width + 3) >> 2
        one, two, three = _sums(
            row, at_row, vocabulary, gathered, size, is_whole, key, step, shift, highest, scale, by_mass,
            rows, penalties, entries, biases, masks, entries_row, masks_row,
            TILE,
        )  # fmt: skip
        passed = ((above + one >= enough) & (step < width)).to(tl.uint32)
        passed += ((above + two >= enough) & (2 * step < width)).to(tl.uint32)
        passed += ((above + three >= enough) & (3 * step < width)).to(tl.uint32)
        key += passed * step
        width = tl.minimum(step, width - passed * step)
    return key


@triton.jit
def _settle(
    logits, temperature, top_k, top_p, min_p, surveys, state, found, gathered, out, room, logits_row, vocabulary, tiles,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    TILE: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """The threshold of each row."""
    # int64 before multiplying: see _survey
    at_row = tl.program_id(0).to(tl.int64)
    heat, _, p, by_k, by_p = _asked(temperature, top_k, top_p, at_row, vocabulary)
    relative = tl.load(min_p + at_row)
    by_relative = (heat > 0) & (relative > 0)
    least = float("-inf")
    if by_k | by_p | by_relative:
        highest = _highest(surveys, at_row, tiles, TILES)
        if by_k | by_p:
            row = logits + at_row * logits_row
            gathered += at_row * room
            shift = tl.full([], 32 - BITS, tl.uint32)
            if rows is not None:
                # changed logits have all bits of float32
                shift = tl.where(is_adjusted(rows, at_row), 0, shift).to(tl.uint32)
            count = tl.load(found + at_row)
            is_whole = count > room
            size = tl.where(is_whole, vocabulary, count)
            scale = _LOG2_E / heat
            state += at_row * _STATE
            interval = state + 3 * STAGE + 2
            unit = tl.where(by_k, 1.0, _ONE)
            enough = tl.maximum((tl.load(state + 1) * unit).to(tl.int64), 1)
            above = (tl.load(interval + 2) * unit).to(tl.int64)
            above = tl.where(is_whole | (by_k & by_p), 0, above)
            key = _in_order(tl.load(interval)) >> shift
            end = ((_in_order(tl.load(interval + 1)) - 1) >> shift) + 1
            key = _searched(
                key, end, above, enough,
                row, at_row, vocabulary, gathered, size, is_whole, shift, highest, scale, by_k == 0,
                rows, penalties, entries, biases, masks, entries_row, masks_row,
                TILE,
            )  # fmt: skip
            if by_k & by_p:
                left = _sums(
                    row, at_row, vocabulary, gathered, size, is_whole, key, key * 0, shift, highest, scale, True,
                    rows, penalties, entries, biases, masks, entries_row, masks_row,
                    TILE,
                )[0]  # fmt: skip
                enough = tl.maximum((p * left.to(tl.float32)).to(tl.int64), 1)
                end = (_in_order(highest) >> shift) + 1
                key = _searched(
                    key, end, enough * 0, enough,
                    row, at_row, vocabulary, gathered, size, is_whole, shift, highest, scale, True,
                    rows, penalties, entries, biases, masks, entries_row, masks_row,
                    TILE,
                )  # fmt: skip
            least = _of_order(key << shift)
        if by_relative:
            least = tl.maximum(least, highest + heat * tl.log(tl.minimum(relative, 1.0)))
    tl.store(out + at_row, least)


def threshold(logits: torch.Tensor, draw: Draw, *, gpu: Gpu | None = None) -> torch.Tensor:
    """The result of `threshold_reference`, or another number between the same two logits, from masses in float32.

    Raises ValueError for other shapes.
    """
    gpu = gpu or gpu_of(logits.device)
    draw.require(logits)
    rows, vocabulary = logits.shape
    require(vocabulary < 2**24, f"float32 cannot count {vocabulary} tokens")
    tile = min(MOST_TILE, max(128, triton.next_power_of_2(vocabulary)))
    tiles, room = triton.cdiv(vocabulary, tile), max(16, triton.next_power_of_2(vocabulary // GATHERED))
    each = max(1, triton.cdiv(rows * tiles, PROGRAMS_BESIDE * gpu.processors))
    grid = (rows, triton.cdiv(tiles, each))
    empty = partial(torch.empty, dtype=torch.float32, device=logits.device)
    surveys, state, sums = empty(rows, tiles, 3), empty(rows, _STATE.value), empty(STAGES, rows, tiles, _PIVOTS.value)
    found, gathered, out = empty(rows, dtype=torch.int32), empty(rows, room), empty(rows)

    asked, sizes = (logits, draw.temperature, draw.top_k, draw.top_p), (logits.stride(0), vocabulary, tiles)
    adjusting, constants = draw.adjusting, {"TILES": triton.next_power_of_2(tiles)}
    surveyed = (*asked, draw.min_p, surveys, found, *sizes, each, *adjusting)
    gpu.start(Launch(_survey, grid, surveyed, {"TILE": tile}, warps=8))
    for stage in range(STAGES):
        measured = (*asked, surveys, state, sums, *sizes, each, *adjusting)
        measuring = constants | {"TILE": tile, "CHUNK": min(MEASURED, tile), "STAGE": stage}
        gpu.start(Launch(_measure, grid, measured, measuring))
    last = constants | {"STAGE": STAGES}
    gathering = (*asked, surveys, state, sums, found, gathered, room, *sizes, each * tile, *adjusting)
    gpu.start(Launch(_gather, grid, gathering, last | {"CHUNK": min(SETTLED, tile)}))
    settled = (*asked, draw.min_p, surveys, state, found, gathered, out, room, *sizes, *adjusting)
    settling = last | {"TILE": min(SETTLED, tile), "BITS": BITS[logits.dtype]}
    gpu.start(Launch(_settle, (rows,), settled, settling, warps=8))
    return out
