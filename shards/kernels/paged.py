"""The common part of attention over pages, for sequences with one new token and for chunks."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from shards.kernels.cache import BLOCK_TOKENS
from shards.kernels.launch import as_operand, dot, require, require_shape


@triton.jit
def attend_to_page(
    carried,
    q,
    at,
    scales_at,
    written,
    seen,
    kv_side,
    scales_side,
    score_scale,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    QUANTISED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Advance the state (highest product, sum of weights, sum of values) per row by one page, and return it.

    `at` [positions, dims] and `scales_at` [positions] are the addresses of the page's keys. `written` [positions] masks
    the positions with KV, `seen` [rows or 1, positions] those that a row sees; on a page without MASKED all rows see
    all. A weight is 2 to the power of (product - highest) * `score_scale`, which is positive. Source: Milakov and
    Gimelshein, "Online normalizer calculation for softmax" (2018).
    """
    highest, total, sum_of_values = carried
    mask = (tl.arange(0, DIM_TILE) < DIM)[None, :]
    if MASKED:
        # positions behind the context are not written yet, and 0 * NaN is NaN
        mask = mask & written[:, None]
    key = as_operand(tl.load(at, mask=mask, other=0.0), q.dtype)
    value = as_operand(tl.load(at + kv_side, mask=mask, other=0.0), q.dtype)
    products = dot(q, tl.trans(key))
    if QUANTISED:
        products *= tl.load(scales_at, mask=written, other=0.0)[None, :]
    if MASKED:
        products = tl.where(seen, products, float("-inf"))
    higher = tl.maximum(highest, tl.max(products, axis=1))
    # for a row that has seen nothing yet, -inf - -inf would be NaN
    finite = tl.where(higher == float("-inf"), 0.0, higher) * score_scale
    # one rounding, and not where the compiler likes: a page gives the same bits with a mask and without
    weights = tl.exp2(tl.fma(products, score_scale, -finite[:, None]))
    fading = tl.exp2(tl.fma(highest, score_scale, -finite))
    total = total * fading + tl.sum(weights, axis=1)
    if QUANTISED:
        weights *= tl.load(scales_at + scales_side, mask=written, other=0.0)[None, :]
    sum_of_values = sum_of_values * fading[:, None] + dot(as_operand(weights, q.dtype), value)
    return higher, total, sum_of_values


def constants_of(
    kv: torch.Tensor, *, group: int, rows: int, window: int | None, is_quantised: bool
) -> dict[str, int | bool]:
    """The constants of both kernels: `group` heads share one of kv's, and `rows` rows are processed at once."""
    return {
        "KV_HEADS": kv.shape[2],
        "GROUP": group,
        "ROWS": rows,
        "DIM": kv.shape[4],
        "DIM_TILE": triton.next_power_of_2(kv.shape[4]),
        "BLOCK": BLOCK_TOKENS,
        "WINDOW": window or 0,
        "QUANTISED": is_quantised,
    }


def page_bytes(kv: torch.Tensor, element_size: int) -> int:
    """Bytes of shared memory of one head's keys and values of one page, with dimensions rounded up to a power of 2."""
    tile: int = triton.next_power_of_2(kv.shape[4])
    return 2 * BLOCK_TOKENS * tile * element_size


def score_scale(dim: int, scale: float | None) -> float:
    """The factor on scores, `scale` or 1 / sqrt(dim): powers of 2 are one instruction, powers of e two."""
    return math.log2(math.e) * (dim**-0.5 if scale is None else scale)


def require_sinks(sinks: torch.Tensor | None, heads: int) -> None:
    """Raise ValueError unless these are scores of a position without a value, one per head."""
    if sinks is not None:
        require_shape("sinks", sinks, (heads,))
        require(sinks.is_contiguous(), "sinks are not in one piece")


@triton.jit
def begin(sinks, at, mask, is_first, score_scale, ROWS: tl.constexpr, DIM_TILE: tl.constexpr):
    """The state of `attend_to_page` before any page. The `sinks` at [rows] count once: in what `is_first`."""
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        score = tl.load(sinks + at, mask=mask, other=0.0).to(tl.float32) * (1.4426950408889634 / score_scale)
        highest = tl.where(is_first, score, highest)
        total = tl.where(is_first, 1.0, total)
    return highest, total, tl.zeros([ROWS, DIM_TILE], tl.float32)
