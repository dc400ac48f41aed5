"""Log-probabilities of raw logits: the likeliest tokens of each row that asks for them, tile by tile."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shards.kernels.launch import Gpu, Launch

TILE = 4096

MOST_TOP = 20
"""Most of the likeliest tokens that a row may ask for."""

TOP_ROOM = 32
"""MOST_TOP rounded up to a power of 2."""

_TOP_ROOM = tl.constexpr(TOP_ROOM)

_LOWEST = tl.constexpr(-(2**63))

LOG2_E = tl.constexpr(1.4426950408889634)


def top_reference(logits: torch.Tensor, tokens: torch.Tensor, top: list[int]) -> list[tuple[float, list[int]]]:
    """For each row the log-probability of its token, and its `top` likeliest tokens; the lowest of equal ones first."""
    logprobs = logits.float().log_softmax(1)
    ordered = logprobs.sort(dim=1, descending=True, stable=True).indices
    return [
        (float(row[token]), ids[: max(0, most)].tolist())
        for row, token, ids, most in zip(logprobs, tokens.tolist(), ordered, top, strict=True)
    ]


@triton.jit
def _top_of_tiles(logits, top, highs, totals, keys, logits_row, vocabulary, TILE: tl.constexpr, ROOM: tl.constexpr):
    # int64 before multiplying: 20,000 rows of 128,256 pass 2**31
    at_row = tl.program_id(0).to(tl.int64)
    most = tl.load(top + at_row)
    if most >= 0:
        tile = tl.program_id(1)
        at = at_row * tl.num_programs(1) + tile
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < vocabulary
        wide = tl.load(logits + at_row * logits_row + token, mask=inside, other=float("-inf")).to(tl.float32)
        high = tl.max(wide, axis=0)
        tl.store(highs + at, high)
        tl.store(totals + at, tl.sum(tl.exp2((wide - high) * LOG2_E), axis=0))
        # int64 of the same order, in which the lowest of equal tokens is the largest
        bits = (wide + 0.0).to(tl.int32, bitcast=True)
        order = bits ^ tl.where(bits < 0, 0x7FFFFFFF, 0)
        key = tl.where(inside, (order.to(tl.int64) << 32) | (0x7FFFFFFF - token), _LOWEST)
        for place in range(most):
            best = tl.max(key, axis=0)
            tl.store(keys + at * ROOM + place, best)
            key = tl.where(key == best, _LOWEST, key)


@triton.jit
def store_logprobs(logits_at_token, top, highs, totals, keys, out, row, tiles, TILES: tl.constexpr):
    """Merge the tiles of `row` into `out`: the log-probability of its token, those of the likeliest, and their ids."""
    most = tl.load(top + row)
    if most >= 0:
        tile = tl.arange(0, TILES)
        inside = tile < tiles
        high = tl.load(highs + row * tiles + tile, mask=inside, other=float("-inf"))
        total = tl.load(totals + row * tiles + tile, mask=inside, other=0.0)
        highest = tl.max(high, axis=0)
        sum_exp = tl.sum(total * tl.exp2((high - highest) * LOG2_E), axis=0)
        normaliser = highest + tl.log(sum_exp)
        out += row * (1 + 2 * _TOP_ROOM)
        own = tl.load(logits_at_token).to(tl.float32) - normaliser
        tl.store(out, own.to(tl.int32, bitcast=True))
        places = tl.arange(0, _TOP_ROOM)[None, :]
        at = keys + (row * tiles + tile[:, None]) * _TOP_ROOM + places
        key = tl.load(at, mask=inside[:, None] & (places < most), other=_LOWEST)
        for place in range(most):
            best = tl.max(tl.max(key, axis=1), axis=0)
            order = (best >> 32).to(tl.int32)
            value = (order ^ tl.where(order < 0, 0x7FFFFFFF, 0)).to(tl.float32, bitcast=True) - normaliser
            tl.store(out + 1 + place, value.to(tl.int32, bitcast=True))
            tl.store(out + 1 + _TOP_ROOM + place, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32))
            key = tl.where(key == best, _LOWEST, key)


LOGPROB_WORDS = 1 + 2 * TOP_ROOM
"""Words of a row's log-probabilities: float32 of its token and of the likeliest ones, then their ids in int32."""


def top_of_tiles(logits: torch.Tensor, top: torch.Tensor, *, gpu: Gpu) -> tuple[torch.Tensor, ...]:
    """Of each tile of rows that ask (`top` [rows] int32 is not -1), the largest logit, the sum of exponentials, and
    keys of its likeliest tokens.
    """
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    highs = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    totals = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    keys = torch.empty(rows, tiles, TOP_ROOM, dtype=torch.int64, device=logits.device)
    arguments = (logits, top, highs, totals, keys, logits.stride(0), vocabulary)
    gpu.start(Launch(_top_of_tiles, (rows, tiles), arguments, {"TILE": TILE, "ROOM": TOP_ROOM}))
    return highs, totals, keys
