"""Draws a token for each row of logits; a row's token depends on that row alone.

Two steps: a threshold per row, from top-k, top-p and min-p, then the largest of logit / temperature + Gumbel noise
above it, which is a draw from the softmax. The noise comes from Philox, keyed by (seed, position, token), so that
neither neighbouring rows nor their order change a row's draw. Logits are changed as `shards.kernels.adjust` says while
they are read; log-probabilities (`shards.kernels.logprobs`) are those of the logits as they came.
"""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shards.kernels.adjust import (
    COUNT_SHIFT,
    COUNTS,
    MOST_COUNTED,
    NOT_ADJUSTED,
    ONE_MORE,
    Adjustments,
    adjust_reference,
    adjusted,
    is_adjusted,
)
from shards.kernels.launch import Gpu, Launch, gpu_of, require, require_shape
from shards.kernels.logprobs import LOGPROB_WORDS, store_logprobs, top_of_tiles

# Philox gives 4 numbers per call: a tile of tokens has 4 quarters, one for each.
QUARTER = 1024

BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""The bits of float32, from the top and an even number, by which numbers of a type differ."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters of the draw of each row, [rows] each: temperature, top_p and min_p float32; top_k and top_logprobs
    int32; seed and position int64.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and top_logprobs -1 are off. `truncated`: any row has one of the
    first three on.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    top_logprobs: torch.Tensor
    adjustments: Adjustments | None = None
    truncated: bool = True


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """What was drawn: `tokens` [token|is sound, rows] int32; `logprobs` [rows, LOGPROB_WORDS] int32 of rows that ask.

    A row is sound if all of its logits are finite, and its largest one after all changes is.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor


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


def sample_reference(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The drawn tokens [rows] int64. The reference for `sample`, for rows that are sound.

    Of equal values the lowest token id wins.
    """
    wide, temperature = adjust_reference(logits, draw.adjustments), draw.temperature[:, None]
    noisy = wide / torch.where(temperature > 0, temperature, 1.0)
    noisy = noisy + torch.where(temperature > 0, gumbel_reference(draw.seed, draw.position, logits.shape[1]), 0.0)
    return noisy.masked_fill(wide < threshold_reference(logits, draw)[:, None], -math.inf).argmax(dim=1)


def gumbel_reference(seed: torch.Tensor, position: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel noise [rows, vocabulary] float32 of seeds and positions [rows].

    Token t uses output q of Philox-4x32-10 with the seed as key and the counter (4096-tile of t * 1024 + t % 1024,
    position's low half, its high half, 0), where q is t's quarter of its tile. Source: Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3" (2011).
    """
    token = torch.arange(vocabulary, device=seed.device)
    counter = token // (4 * QUARTER) * QUARTER + token % QUARTER
    low, high = (position[:, None] & 0xFFFFFFFF).expand(-1, vocabulary), (position[:, None] >> 32) & 0xFFFFFFFF
    words = [counter.expand_as(low), low, high.expand_as(low), torch.zeros_like(low)]
    keys = [seed[:, None] & 0xFFFFFFFF, (seed[:, None] >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        high_a, high_b = (a >> 32) & 0xFFFFFFFF, (b >> 32) & 0xFFFFFFFF
        words = [high_b ^ words[1] ^ keys[0], b & 0xFFFFFFFF, high_a ^ words[3] ^ keys[1], a & 0xFFFFFFFF]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    bits = torch.stack(words).gather(0, (token % (4 * QUARTER) // QUARTER).expand_as(low)[None])[0]
    uniform = (bits.float() + 0.5) * 2.0**-32
    return -torch.log(_exponential_reference(uniform))


def _exponential_reference(uniform: torch.Tensor) -> torch.Tensor:
    """-log(1 - uniform): the likeliest draws are near 0, where float32 is finest."""
    near_zero = uniform * (1 + uniform * 0.5)
    return torch.where(uniform < 2.0**-10, near_zero, -torch.log(1 - uniform.clamp(max=1 - 2.0**-24)))


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
def _counts(
    row, at_row, vocabulary, key, digit,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    TILE: tl.constexpr,
):  # fmt: skip
    """The numbers of a row's logits that are not below `key` plus 1, 2 and 3 times `digit` in order."""
    ones, twos, threes = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(0, vocabulary, TILE):
        token = start + tl.arange(0, TILE)
        wide = _logits(row, at_row, token, vocabulary, rows, penalties, entries, biases, masks, entries_row, masks_row)
        # 0 is below all keys that are asked for
        order = tl.where(token < vocabulary, _in_order(wide), 0)
        ones += (order >= key + digit).to(tl.int32)
        twos += (order >= key + 2 * digit).to(tl.int32)
        threes += (order >= key + 3 * digit).to(tl.int32)
    return tl.sum(ones, axis=0), tl.sum(twos, axis=0), tl.sum(threes, axis=0)


@triton.jit
def _masses(
    row, at_row, vocabulary, key, digit, highest, scale,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    TILE: tl.constexpr,
):  # fmt: skip
    """The sums of exp2((logit - highest) * scale) over the logits that `_counts` counts."""
    ones, twos, threes = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, vocabulary, TILE):
        token = start + tl.arange(0, TILE)
        wide = _logits(row, at_row, token, vocabulary, rows, penalties, entries, biases, masks, entries_row, masks_row)
        order = _in_order(wide)
        mass = tl.exp2((wide - highest) * scale)
        ones += tl.where(order >= key + digit, mass, 0.0)
        twos += tl.where(order >= key + 2 * digit, mass, 0.0)
        threes += tl.where(order >= key + 3 * digit, mass, 0.0)
    return tl.sum(ones, axis=0), tl.sum(twos, axis=0), tl.sum(threes, axis=0)


@triton.jit
def _with_low_bits(key, low):
    """The key of a logit, from its first bits, if the rest of float32, `low`, is 0: negative numbers are inverted."""
    return tl.where(key >= 0x80000000, key, key | low)


@triton.jit
def _threshold(
    logits, temperature, top_k, top_p, min_p, out, logits_row, vocabulary,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    # int64 before multiplying: 20,000 rows of 128,256 pass 2**31
    at_row = tl.program_id(0).to(tl.int64)
    row = logits + at_row * logits_row
    heat = tl.load(temperature + at_row)
    k = tl.load(top_k + at_row)
    p = tl.load(top_p + at_row)
    relative = tl.load(min_p + at_row)
    by_k = (heat > 0) & (k > 0) & (k < vocabulary)
    by_p = (heat > 0) & (p < 1.0)
    by_relative = (heat > 0) & (relative > 0)
    least = float("-inf")
    if by_k | by_p | by_relative:
        passes = tl.full([], BITS // 2, tl.int32)
        low = tl.full([], (1 << (32 - BITS)) - 1, tl.uint32)
        if rows is not None:
            # changed logits have all bits of float32
            is_changed = is_adjusted(rows, at_row)
            passes = tl.where(is_changed, 16, passes)
            low = tl.where(is_changed, 0, low).to(tl.uint32)
        highs = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, vocabulary, TILE):
            token = start + tl.arange(0, TILE)
            wide = _logits(
                row, at_row, token, vocabulary, rows, penalties, entries, biases, masks, entries_row, masks_row
            )
            highs = tl.maximum(highs, wide)
        highest = tl.max(highs, axis=0)
        scale = 1.4426950408889634 / heat
        # two bits at a time from the top, the largest key that still keeps enough: exact, and without sorting
        key = tl.full([], 0, tl.uint32)
        if by_k:
            digit = tl.full([], 0x40000000, tl.uint32)
            for _ in range(passes):
                one, two, three = _counts(
                    row, at_row, vocabulary, key, digit,
                    rows, penalties, entries, biases, masks, entries_row, masks_row,
                    TILE,
                )  # fmt: skip
                key += digit * ((one >= k).to(tl.uint32) + (two >= k).to(tl.uint32) + (three >= k).to(tl.uint32))
                digit = digit >> 2
            key = _with_low_bits(key, low)
        if by_p:
            enough = p * _masses(
                row, at_row, vocabulary, key, key * 0, highest, scale,
                rows, penalties, entries, biases, masks, entries_row, masks_row,
                TILE,
            )[0]  # fmt: skip
            key = tl.full([], 0, tl.uint32)
            digit = tl.full([], 0x40000000, tl.uint32)
            for _ in range(passes):
                one, two, three = _masses(
                    row, at_row, vocabulary, key, digit, highest, scale,
                    rows, penalties, entries, biases, masks, entries_row, masks_row,
                    TILE,
                )  # fmt: skip
                found = (one >= enough).to(tl.uint32) + (two >= enough).to(tl.uint32) + (three >= enough).to(tl.uint32)
                key += digit * found
                digit = digit >> 2
            # nothing is enough for a top_p of 0, and one token is kept
            key = tl.minimum(_with_low_bits(key, low), _in_order(highest))
        if by_k | by_p:
            least = _of_order(key)
        if by_relative:
            least = tl.maximum(least, highest + heat * tl.log(tl.minimum(relative, 1.0)))
    tl.store(out + at_row, least)


@triton.jit
def _gumbel(bits):
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # the likeliest draws are near 0, where float32 is finest
    near_zero = uniform * (1 + uniform * 0.5)
    exponential = tl.where(uniform < 0.0009765625, near_zero, -tl.log(1 - tl.minimum(uniform, 0.99999994)))
    return -tl.log(exponential)


@triton.jit
def _best_of_tiles(
    logits, least, temperature, seed, position, best, best_token, logits_row, vocabulary,
    rows, penalties, entries, biases, masks, entries_row, masks_row,
    QUARTER: tl.constexpr,
):  # fmt: skip
    # int64 before multiplying: see _threshold
    at_row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    heat = tl.load(temperature + at_row)
    lane = tl.arange(0, QUARTER)
    counter = (tile * QUARTER + lane).to(tl.uint32)
    at = tl.load(position + at_row)
    low = (at & 0xFFFFFFFF).to(tl.uint32)
    high = ((at >> 32) & 0xFFFFFFFF).to(tl.uint32)
    words = tl.philox(tl.load(seed + at_row), counter, counter * 0 + low, counter * 0 + high, counter * 0)
    highest = tl.full([QUARTER], float("-inf"), tl.float32)
    where = tl.full([QUARTER], 0, tl.int32) + tile * 4 * QUARTER + lane
    broken = tl.full([QUARTER], 0, tl.int32)
    for quarter in tl.static_range(4):
        token = (tile * 4 + quarter) * QUARTER + lane
        inside = token < vocabulary
        wide = tl.load(logits + at_row * logits_row + token, mask=inside, other=float("-inf")).to(tl.float32)
        # not if it is NaN either
        is_finite = tl.abs(wide) < float("inf")
        wide = adjusted(wide, token, inside, at_row, rows, penalties, entries, biases, masks, entries_row, masks_row)
        broken |= (inside & ~(is_finite & (wide < float("inf")))).to(tl.int32)
        noisy = wide
        if heat > 0:
            noisy = wide / heat + _gumbel(words[quarter])
        if least is not None:
            noisy = tl.where(wide < tl.load(least + at_row), float("-inf"), noisy)
        better = noisy > highest
        where = tl.where(better, token, where)
        highest = tl.where(better, noisy, highest)
    top = tl.max(highest, axis=0)
    is_broken = tl.max(broken, axis=0) > 0
    tl.store(best + at_row * tl.num_programs(1) + tile, tl.where(is_broken, float("nan"), top))
    # the lowest of equal tokens, so that the order of reduction does not matter
    tl.store(
        best_token + at_row * tl.num_programs(1) + tile,
        tl.min(tl.where(highest == top, where, 0x7FFFFFFF), axis=0),
    )


@triton.jit
def _best_of_rows(
    best, best_token, logits, tokens, pool, target, top, highs, totals, keys, logprobs,
    rows, entries, entries_row, logits_row, vocabulary, tiles, places,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILE)
    mask = tile < tiles
    highest = tl.load(best + row * tiles + tile, mask=mask, other=float("-inf"))
    candidate = tl.load(best_token + row * tiles + tile, mask=mask, other=0x7FFFFFFF)
    is_broken = tl.max((highest != highest).to(tl.int32), axis=0) > 0
    top_value = tl.max(tl.where(highest == highest, highest, float("-inf")), axis=0)
    # a token even of a row that is not sound, because the next step reads it
    token = tl.minimum(tl.min(tl.where(highest == top_value, candidate, 0x7FFFFFFF), axis=0), vocabulary - 1)
    is_sound = (top_value > float("-inf")) & ~is_broken
    tl.store(tokens + row, token)
    tl.store(tokens + tl.num_programs(0) + row, is_sound.to(tl.int32))
    if pool is not None:
        place = tl.load(target + row)
        if place < places:
            tl.store(pool + place, token)
    if rows is not None:
        slot = tl.load(rows + row * 3).to(tl.int64)
        if (slot >= 0) & ((tl.load(rows + row * 3 + 2) & COUNTS) > 0):
            at = entries + slot * entries_row + token
            entry = tl.load(at)
            if (entry >> COUNT_SHIFT) < MOST_COUNTED:
                tl.store(at, entry + ONE_MORE)
    store_logprobs(logits + row * logits_row + token, top, highs, totals, keys, logprobs, row, tiles, TILE)


def threshold(logits: torch.Tensor, draw: Draw, *, gpu: Gpu | None = None) -> torch.Tensor:
    """The result of `threshold_reference`, with masses summed in float32. Raises ValueError for other shapes."""
    gpu = gpu or gpu_of(logits.device)
    _require_rows(logits, draw)
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    # one program reads its row up to 34 times, and 18 in bfloat16, from the cache: exponentials are what takes the time
    tile = min(4096, max(128, triton.next_power_of_2(vocabulary)))
    parameters = (draw.temperature, draw.top_k, draw.top_p, draw.min_p)
    arguments = (logits, *parameters, out, logits.stride(0), vocabulary, *_adjusting(draw))
    constants = {"TILE": tile, "BITS": BITS[logits.dtype]}
    gpu.start(Launch(_threshold, (rows,), arguments, constants, warps=16, stages=1))
    return out


def sample(
    logits: torch.Tensor,
    draw: Draw,
    *,
    pool: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    gpu: Gpu | None = None,
) -> DrawnRows:
    """The tokens of `sample_reference`, and log-probabilities. Rows need not be adjacent.

    The token of row r is also stored in `pool` (int32) at place `target[r]` (int64), unless the pool ends before it,
    and counted in the row's slot. Raises ValueError for other shapes.
    """
    gpu = gpu or gpu_of(logits.device)
    _require_rows(logits, draw)
    rows, vocabulary = logits.shape
    least = threshold(logits, draw, gpu=gpu) if draw.truncated else None
    tiles = triton.cdiv(vocabulary, 4 * QUARTER)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, LOGPROB_WORDS, dtype=torch.int32, device=logits.device)
    arguments = (
        *(logits, least, draw.temperature, draw.seed, draw.position, best, best_token),
        *(logits.stride(0), vocabulary, *_adjusting(draw)),
    )
    gpu.start(Launch(_best_of_tiles, (rows, tiles), arguments, {"QUARTER": QUARTER}))
    of_tiles = top_of_tiles(logits, draw.top_logprobs, gpu=gpu)
    counted = _adjusting(draw)
    merged = (
        *(best, best_token, logits, tokens, pool, target, draw.top_logprobs, *of_tiles, logprobs),
        *(counted[0], counted[2], counted[5], logits.stride(0), vocabulary, tiles, 0 if pool is None else len(pool)),
    )
    constants = {"TILE": max(16, triton.next_power_of_2(tiles))}
    gpu.start(Launch(_best_of_rows, (rows,), merged, constants, warps=1))
    return DrawnRows(tokens, logprobs)


def _adjusting(draw: Draw) -> tuple[torch.Tensor | int | None, ...]:
    return NOT_ADJUSTED if draw.adjustments is None else draw.adjustments.arguments


def _require_rows(logits: torch.Tensor, draw: Draw) -> None:
    require(
        logits.dim() == 2 and logits.stride(1) == 1, f"logits are {list(logits.shape)}, not rows [rows, vocabulary]"
    )
    for field in ("temperature", "top_k", "top_p", "min_p", "seed", "position", "top_logprobs"):
        require_shape(field, getattr(draw, field), (logits.shape[0],))
    if draw.adjustments is not None:
        draw.adjustments.require(*logits.shape)
