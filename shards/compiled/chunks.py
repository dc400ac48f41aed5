"""Attention of chunks, the new tokens of sequences, over a paged cache in bfloat16, in tiles of 32 queries.

Positions are visited in their order, one block after the other, and a query is a column of its tile. So its result
depends neither on the blocks that hold its context, nor on how a prompt was cut into chunks, nor on other queries. One
thread of an AMD EPYC (Zen 4) computes 130 GFLOP/s, where torch's operator computes 50 to 70.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from shards.compiled.floats import LOOSE, as_bits, exponential, loop, rounded
from shards.compiled.tiles import LANES, ROWS, add_tile

_BLOCK = 64

_STRIPE = 6 * LANES
"""Queries of a chunk that are computed together: for them a block is brought into the form of tiles once."""

_NOTHING_SEEN = np.float32(-1e30)
"""In place of -inf, from which -inf could not be subtracted."""


@njit
def _stripes(tokens: Any, group: Any) -> Any:
    """The number of stripes of a chunk with so many `tokens`, each with `group` queries."""
    return (tokens * group + _STRIPE - 1) // _STRIPE


@njit
def _stripe_of(number: Any, chunks: Any, group: Any) -> Any:
    """The chunk of stripe `number` of all `chunks`, and the first query of the stripe there."""
    chunk = 0
    while number >= _stripes(chunks[chunk, 1], group):
        number -= _stripes(chunks[chunk, 1], group)
        chunk += 1
    return chunk, number * _STRIPE


@njit
def _take_queries(queries: Any, first: Any, past: Any, words: Any, positions: Any) -> None:
    """Fill tiles `words` [tiles, pairs, LANES] and their `positions` [tiles, LANES] with queries from `first` on.

    `queries` [tokens, group, pairs], of which the first has position `past`; the last one fills the places behind it.
    """
    tokens, group, pairs = queries.shape
    for tile in range(len(words)):
        for lane in range(LANES):
            query = min(first + tile * LANES + lane, tokens * group - 1)
            positions[tile, lane] = past + query // group
            for pair in range(pairs):
                words[tile, pair, lane] = queries[query // group, query % group, pair]


@njit
def _take_block(keys: Any, values: Any, seen: Any, known: Any, key_words: Any, value_words: Any) -> None:
    """Fill `key_words` [pairs, 64] and `value_words` [32, head_dim] from a block's words `keys`, and its `values`.

    Only numbers `seen` to `known` of them are read, the others count as 0: there is no weight by which NaN gives 0.
    """
    for key in range(_BLOCK):
        for pair in range(len(key_words)):
            key_words[pair, key] = keys[key, pair] if seen <= key < known else np.uint32(0)
    for pair in range(len(value_words)):
        line = value_words[pair]
        line[:] = 0
        for shift in range(2):
            position = 2 * pair + shift
            if seen <= position < known:
                numbers = values[position]
                for index in range(len(line)):
                    line[index] |= np.uint32(numbers[index]) << np.uint32(16 * shift)


@njit
def _hide(scores: Any, position: Any, positions: Any, window: Any) -> None:
    """Set `scores` [64, LANES] of keys from `position` on to -inf where the queries at `positions` do not see them."""
    for key in range(_BLOCK):
        line = scores[key]
        for lane in range(scores.shape[1]):
            age = positions[lane] - np.int32(position + key)
            line[lane] = line[lane] if np.int32(0) <= age < window else np.float32(-np.inf)


@njit(inline="always")
def _larger(left: Any, right: Any) -> Any:
    return left if left > right else right  # noqa: FURB136 - numba's max heeds NaN, and becomes no vector


@njit(inline="always")
def _pair(first: Any, second: Any) -> Any:
    """The word of two float32 that are not negative, each the nearest bfloat16."""
    half = np.uint32(0x8000)
    return ((as_bits(first) + half) >> np.uint32(16)) | ((as_bits(second) + half) & np.uint32(0xFFFF0000))


@njit(fastmath=LOOSE)
def _weigh(scores: Any, scale: Any, largest: Any, totals: Any, factors: Any, words: Any) -> None:
    """The weights of a block, as `words` [32, LANES] of pairs of positions, from `scores` [64, LANES].

    `largest` score and `totals` of weights [LANES] are updated; `factors` multiply what was summed before.
    """
    lanes, top = scores.shape[1], largest.copy()
    for key in range(0, _BLOCK, 4):
        line0, line1, line2, line3 = scores[key], scores[key + 1], scores[key + 2], scores[key + 3]
        for lane in range(lanes):
            most = _larger(_larger(line0[lane], line1[lane]), _larger(line2[lane], line3[lane]))
            top[lane] = _larger(most, top[lane])
    for lane in range(lanes):
        factors[lane] = exponential((largest[lane] - top[lane]) * scale)
        totals[lane] *= factors[lane]
        largest[lane] = top[lane]
    for pair in range(len(words)):
        line0, line1, line = scores[2 * pair], scores[2 * pair + 1], words[pair]
        for lane in range(lanes):
            first = exponential((line0[lane] - top[lane]) * scale)
            second = exponential((line1[lane] - top[lane]) * scale)
            totals[lane] += first + second
            line[lane] = _pair(first, second)


@njit
def _scale_rows(rows: Any, factors: Any) -> None:
    """Multiply each of `rows` by its factor, which mostly is 1."""
    for row in range(len(rows)):
        line, factor = rows[row], factors[row]
        if factor != np.float32(1):
            for index in range(len(line)):
                line[index] *= factor


@loop(
    "void(uint32[:, :, :, :], uint16[:, :, :, ::1], int64[:, ::1], int64[:, ::1], int64,"
    " float32, float32[:, ::1], uint16[:, :, :, ::1])",
    is_parallel=True,
)
def attend_chunks(
    queries: Any,
    layer: Any,
    chunks: Any,
    blocks: Any,
    window: Any,
    scale: Any,
    sinks: Any,
    out: Any,
) -> None:
    """For each token of `chunks`, the mix of the values at the last `window` positions up to its own, into `out`.

    `queries` words [tokens, kv_heads, group, pairs] and `out` [tokens, kv_heads, group, head_dim]; `layer` [k|v,
    kv_heads, slots, head_dim], or [1, ...] if keys are values. A chunk [start, tokens, context] is in tokens `start` to
    `start` + `tokens`, the last of `context` positions in `blocks` [chunks, blocks]. `sinks` [kv_heads, group] are
    scores of a position without a value, or empty.
    """
    group, pairs = queries.shape[2:]
    dim = 2 * pairs
    stripes = 0
    for chunk in range(len(chunks)):
        stripes += _stripes(chunks[chunk, 1], group)
    for task in prange(queries.shape[1] * stripes):
        head = task // stripes
        own, first = _stripe_of(task % stripes, chunks, group)
        start, tokens, context = chunks[own]
        count, past = min(_STRIPE, tokens * group - first), context - tokens
        tiles = (count + LANES - 1) // LANES
        query_words, positions = np.empty((tiles, pairs, LANES), np.uint32), np.empty((tiles, LANES), np.int32)
        _take_queries(queries[start : start + tokens, head], first, past, query_words, positions)
        largest, totals = np.full((tiles, LANES), _NOTHING_SEEN), np.zeros((tiles, LANES), np.float32)
        if len(sinks):
            for query in range(tiles * LANES):
                largest[query // LANES, query % LANES] = sinks[head, (first + query) % group] / scale
            totals[:] = 1
        mixed, factors = np.zeros((tiles, LANES, dim), np.float32), np.empty(LANES, np.float32)
        scores, weights = np.empty((_BLOCK, LANES), np.float32), np.empty((_BLOCK // 2, LANES), np.uint32)
        key_words, value_words = np.empty((pairs, _BLOCK), np.uint32), np.empty((_BLOCK // 2, dim), np.uint32)
        keys, values = layer[0, head].view(np.uint32), layer[len(layer) - 1, head]
        oldest, newest = max(0, positions[0, 0] - window + 1), positions[-1, -1]
        for position in range(oldest // _BLOCK * _BLOCK, newest + 1, _BLOCK):
            slot = blocks[own, position // _BLOCK] * _BLOCK
            seen, known = max(0, oldest - position), min(_BLOCK, context - position)
            _take_block(keys[slot : slot + _BLOCK], values[slot : slot + _BLOCK], seen, known, key_words, value_words)
            for tile in range(tiles):
                begin, end = positions[tile, 0], positions[tile, -1]
                if position > end or position + _BLOCK <= begin - window + 1:
                    continue
                scores[:] = 0
                for key in range(0, _BLOCK, ROWS):
                    add_tile(key_words[:, key : key + ROWS], query_words[tile], scores[key : key + ROWS])
                if position + _BLOCK - 1 > begin or position <= end - window:
                    _hide(scores, position, positions[tile], window)
                _weigh(scores, scale, largest[tile], totals[tile], factors, weights)
                _scale_rows(mixed[tile], factors)
                for lane in range(0, LANES, ROWS):
                    for index in range(0, dim, LANES):
                        sums = mixed[tile, lane : lane + ROWS, index : index + LANES]
                        add_tile(weights[:, lane : lane + ROWS], value_words[:, index : index + LANES], sums)
        for query in range(count):
            line, share = mixed[query // LANES, query % LANES], np.float32(1) / totals[query // LANES, query % LANES]
            result = out[start + (first + query) // group, head, (first + query) % group]
            for index in range(dim):
                result[index] = rounded(line[index] * share, result[index])
