"""Norms, rotations and quantisation, each in one pass over its numbers, where torch makes four to eight."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from shards.compiled.floats import as_float, loop, rounded, widened

_HALF_ABOVE, _LARGEST, _SMALLEST_ABSMAX = np.float32(128.5), np.float32(127), np.float32(1e-30)
_MAGNITUDE = np.int32(0x7FFFFFFF)
"""The bits of a float32 without its sign. As integers they are ordered like the magnitudes, infinity and NaN last."""

_NORMS = [f"void({number}[:, ::1], {number}[::1], float32, {number}[:, ::1])" for number in ("uint16", "float32")]


@loop(*_NORMS, is_loose=True, is_parallel=True)
def normalise(rows: Any, weight: Any, eps: Any, out: Any) -> None:
    """`out` [rows, width] = `rows` with a root mean square of 1, times `weight` [width]."""
    width = rows.shape[1]
    for row in prange(len(rows)):
        numbers, result = rows[row], out[row]
        total = np.float32(0)
        for index in range(width):
            number = widened(numbers[index])
            total += number * number
        factor = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for index in range(width):
            result[index] = rounded(widened(numbers[index]) * factor * widened(weight[index]), result[index])


_TURNS = [
    f"void({number}[:, :, ::1], int64, {number}[:, ::1], float32, {number}[:, ::1], {number}[:, ::1])"
    for number in ("uint16", "float32")
]


@loop(*_TURNS, is_loose=True, is_parallel=True)
def normalise_and_turn(heads: Any, count: Any, weight: Any, eps: Any, cos: Any, signed_sin: Any) -> None:
    """Normalise the first `count` of each token's `heads` [tokens, heads, head_dim] and rotate them, in place.

    `weight` [count, head_dim] is empty where a family has no such norm; `cos` and `signed_sin` are [tokens, head_dim].
    """
    head_dim = heads.shape[2]
    half = head_dim // 2
    for token in prange(len(heads)):
        turn, shift = cos[token], signed_sin[token]
        numbers = np.empty(head_dim, np.float32)
        for head in range(count):
            stored = heads[token, head]
            for index in range(head_dim):
                numbers[index] = widened(stored[index])
            if len(weight):
                total = np.float32(0)
                for index in range(head_dim):
                    total += numbers[index] * numbers[index]
                factor = np.float32(1) / np.sqrt(total / np.float32(head_dim) + eps)
                factors = weight[head]
                for index in range(head_dim):
                    numbers[index] = numbers[index] * factor * widened(factors[index])
            for index in range(half):
                low, high = numbers[index], numbers[index + half]
                first = low * widened(turn[index]) + high * widened(shift[index])
                second = high * widened(turn[index + half]) + low * widened(shift[index + half])
                stored[index] = rounded(first, stored[index])
                stored[index + half] = rounded(second, stored[index + half])


@loop("void(float32[:, ::1], uint8[:, ::1], float32[:, ::1])", is_parallel=True)
def quantise(rows: Any, numbers: Any, largest: Any) -> None:
    """`numbers` = `rows` [rows, width] in 255 steps around 128, between -`largest` and `largest` [rows, 1]."""
    width = rows.shape[1]
    for row in prange(len(rows)):
        given, result = rows[row], numbers[row]
        bits = given.view(np.int32)
        most_bits = np.int32(0)
        for index in range(width):
            most_bits = max(most_bits, np.int32(bits[index] & _MAGNITUDE))
        most = max(as_float(np.uint32(most_bits)), _SMALLEST_ABSMAX)
        largest[row, 0] = most
        factor = _LARGEST / most
        for index in range(width):
            result[index] = np.uint8(np.int32(given[index] * factor + _HALF_ABOVE))
