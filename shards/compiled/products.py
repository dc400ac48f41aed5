"""One row times a matrix. It is limited by reading the matrix, which a plain loop does faster than oneDNN.

One thread of an AMD EPYC (Zen 4): bfloat16 24 GB/s (oneDNN 10, or 16 if packed), int8 22 GB/s (oneDNN 11).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from shards.compiled.floats import loop, rounded, widened


@loop("void(uint16[::1], uint16[:, ::1], float32[::1], uint16[::1])", is_loose=True, is_parallel=True)
def row_times_bfloat16(row: Any, matrix: Any, bias: Any, out: Any) -> None:
    """`out` [outputs] = `matrix` [outputs, inputs] times `row` [inputs], plus `bias` [outputs] if it is not empty."""
    inputs = matrix.shape[1]
    wide = np.empty(inputs, np.float32)
    for index in range(inputs):
        wide[index] = widened(row[index])
    for output in prange(matrix.shape[0]):
        weights = matrix[output]
        total = np.float32(0)
        for index in range(inputs):
            total += wide[index] * widened(weights[index])
        out[output] = rounded(total + bias[output] if len(bias) else total, out[output])


@loop("void(uint8[::1], int8[:, ::1], float32[::1], float32[::1])", is_parallel=True)
def row_times_int8(row: Any, matrix: Any, scales: Any, out: Any) -> None:
    """`out` [outputs] = `matrix` [outputs, inputs] times (`row` - 128) [inputs], times `scales`; exact sums."""
    inputs = matrix.shape[1]
    wide = np.empty(inputs, np.int16)
    for index in range(inputs):
        wide[index] = np.int16(row[index]) - np.int16(128)
    for output in prange(matrix.shape[0]):
        weights = matrix[output]
        total = np.int32(0)
        for index in range(inputs):
            total = np.int32(total + np.int32(wide[index] * np.int16(weights[index])))
        out[output] = np.float32(total) * scales[output]
