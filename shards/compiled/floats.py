"""How loops are compiled, and bfloat16 and exponentials inside them. A bfloat16 is passed as the uint16 of its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

Loop = TypeVar("Loop", bound=Callable[..., None])

LOOSE = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered and fused, so that they become vectors; NaN and infinity keep their meaning."""


def loop(*signatures: str, is_loose: bool = False, is_parallel: bool = False) -> Callable[[Loop], Loop]:
    """Compile a function for `signatures` when its module is imported, or take it from numba's cache.

    `is_loose` permits to reorder sums; `is_parallel` shares its `prange` among numba's threads.
    """

    def compiled(function: Loop) -> Loop:
        options = {"nogil": True, "parallel": is_parallel, "fastmath": LOOSE if is_loose else False}
        try:
            made: Loop = njit(list(signatures), cache=True, **options)(function)
        except RuntimeError:
            # no folder for the cache can be written
            made = njit(list(signatures), **options)(function)
        return made

    return compiled


def bits(tensor: Tensor) -> npt.NDArray[Any]:
    """The memory of `tensor` as compiled loops take it: bfloat16 as uint16, everything else as it is."""
    array: npt.NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


@intrinsic
def as_float(_context: Any, _bits: Any) -> Any:
    """The float32 with the bits of a uint32."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def as_bits(_context: Any, _number: Any) -> Any:
    """The uint32 with the bits of a float32."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def widened(_context: Any, number: Any) -> Any:
    """The float32 of a bfloat16, or of a float32 itself."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        if number != types.uint16:
            return arguments[0]
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    return types.float32(number), generate


@intrinsic
def rounded(_context: Any, _number: Any, like: Any) -> Any:
    """A float32 as the type of `like`: the nearest bfloat16, to even between two, or itself. NaN stays NaN."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        if like != types.uint16:
            return arguments[0]
        word, half = ir.IntType(32), ir.IntType(16)
        raw = builder.bitcast(arguments[0], word)
        is_odd = builder.and_(builder.lshr(raw, word(16)), word(1))
        nearest = builder.lshr(builder.add(raw, builder.add(is_odd, word(0x7FFF))), word(16))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.select(is_nan, half(0x7FC0), builder.trunc(nearest, half))

    return like(types.float32, like), generate


@njit(inline="always", fastmath={"contract"})
def exponential(number: Any) -> Any:
    """e to the power of a float32 that is not above 0, within 2e-7 of it; 0 below -87.

    Cephes' expf without branches, which becomes a vector.
    """
    clipped = max(number, np.float32(-87.0))
    power = np.floor(clipped * np.float32(1.44269504) + np.float32(0.5))
    rest = clipped - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)
    sum_ = np.float32(1.9875691500e-4)
    sum_ = sum_ * rest + np.float32(1.3981999507e-3)
    sum_ = sum_ * rest + np.float32(8.3334519073e-3)
    sum_ = sum_ * rest + np.float32(4.1665795894e-2)
    sum_ = sum_ * rest + np.float32(1.6666665459e-1)
    sum_ = sum_ * rest + np.float32(5.0000001201e-1)
    whole = sum_ * rest * rest + rest + np.float32(1.0)
    scale = as_float(np.uint32(np.int32(power) + np.int32(127)) << np.uint32(23))
    return whole * scale if number >= np.float32(-87.0) else np.float32(0.0)
