"""Draws a token for each row of logits; a row's token depends on that row alone.

Two steps: a threshold per row (`shards.kernels.threshold`), then the largest of logit / temperature + Gumbel noise
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

from shards.kernels.adjust import COUNT_SHIFT, COUNTS, MOST_COUNTED, ONE_MORE, adjust_reference, adjusted
from shards.kernels.draw import Draw
from shards.kernels.launch import Gpu, Launch, gpu_of
from shards.kernels.logprobs import LOGPROB_WORDS, store_logprobs, top_of_tiles
from shards.kernels.threshold import threshold, threshold_reference

# Philox gives 4 numbers per call: a tile of tokens has 4 quarters, one for each.
QUARTER = 1024


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """What was drawn: `tokens` [token|is sound, rows] int32; `logprobs` [rows, LOGPROB_WORDS] int32 of rows that ask.

    A row is sound if all of its logits are finite, and its largest one after all changes is.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor


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
    # int64 before multiplying: 20,000 rows of 128,256 pass 2**31
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
        if least is not None:
            noisy = tl.where(wide < tl.load(least + at_row), float("-inf"), wide)
        # noise takes most of the time, and few quarters have a token that top-k or top-p left
        if (heat > 0) & (tl.max(noisy, axis=0) > float("-inf")):
            noisy = noisy / heat + _gumbel(words[quarter])
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
    draw.require(logits)
    rows, vocabulary = logits.shape
    least = threshold(logits, draw, gpu=gpu) if draw.truncated else None
    tiles = triton.cdiv(vocabulary, 4 * QUARTER)
    best = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, LOGPROB_WORDS, dtype=torch.int32, device=logits.device)
    arguments = (
        *(logits, least, draw.temperature, draw.seed, draw.position, best, best_token),
        *(logits.stride(0), vocabulary, *draw.adjusting),
    )
    gpu.start(Launch(_best_of_tiles, (rows, tiles), arguments, {"QUARTER": QUARTER}))
    of_tiles = top_of_tiles(logits, draw.top_logprobs, gpu=gpu)
    counted = draw.adjusting
    merged = (
        *(best, best_token, logits, tokens, pool, target, draw.top_logprobs, *of_tiles, logprobs),
        *(counted[0], counted[2], counted[5], logits.stride(0), vocabulary, tiles, 0 if pool is None else len(pool)),
    )
    constants = {"TILE": max(16, triton.next_power_of_2(tiles))}
    gpu.start(Launch(_best_of_rows, (rows,), merged, constants, warps=1))
    return DrawnRows(tokens, logprobs)
