"""A tile of a product in bfloat16, as the instructions of AVX512-BF16 that compilers do not make of loops.

A word is a uint32 with two bfloat16, a pair of numbers that follow each other in a sum; the first has the lower bits.
Each sum adds its pairs in their order, so its bits do not depend on its neighbours.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

ROWS, LANES = 8, 32
"""Rows and columns of a tile: its sums take 16 of 32 registers, two for each row."""

_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
_BYTE, _WORD, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_WORD, 16), ir.VectorType(_FLOAT, 16)
_REGISTER_BYTES, _REGISTERS = 64, 2


def has_tiles() -> bool:
    """Whether numba can compile tiles for this CPU, and torch multiplies no faster there: on matrix units."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+avx512bf16" in features and "+amx-bf16" not in features


@intrinsic
def add_tile(_context: Any, left: Any, right: Any, sums: Any) -> Any:
    """Add to `sums` float32 [ROWS, LANES] the products of words `left` [pairs, ROWS] and `right` [pairs, LANES].

    The numbers of each line are adjacent. 215 GFLOP/s on one thread of an AMD EPYC (Zen 4).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = zip(signature.args, arguments, strict=True)
        _emit(builder, *(context.make_array(kind)(context, builder, given) for kind, given in kinds))
        return context.get_dummy_value()

    return types.void(left, right, sums), generate


def _emit(builder: Any, left: Any, right: Any, sums: Any) -> None:
    """Write the instructions of `add_tile` for numba's arrays."""

    def place(array: Any, line: Any, offset: int, kind: ir.Type) -> Any:
        start = builder.bitcast(array.data, _BYTE.as_pointer())
        stride = builder.extract_value(array.strides, 0)
        distance = builder.add(builder.mul(stride, line), stride.type(offset))
        return builder.bitcast(builder.gep(start, [distance]), kind.as_pointer())

    count = builder.extract_value(left.shape, 0)
    cells = list(product(range(ROWS), range(_REGISTERS)))
    places = [place(sums, count.type(row), part * _REGISTER_BYTES, _FLOATS) for row, part in cells]
    held = [cgutils.alloca_once(builder, _FLOATS) for _ in cells]
    dot_type = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS, _WORDS])
    dot = cgutils.get_or_insert_function(builder.module, dot_type, _DOT)
    for register, at in zip(held, places, strict=True):
        builder.store(builder.load(at, align=4), register)
    with cgutils.for_range(builder, count) as loop:
        columns = [
            builder.load(place(right, loop.index, part * _REGISTER_BYTES, _WORDS), align=4)
            for part in range(_REGISTERS)
        ]
        for (row, part), register in zip(cells, held, strict=True):
            word = builder.load(place(left, loop.index, row * 4, _WORD), align=4)
            single = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, _WORD(0))
            spread = builder.shuffle_vector(single, single, ir.Constant(_WORDS, [0] * 16))
            builder.store(builder.call(dot, [builder.load(register), spread, columns[part]]), register)
    for register, at in zip(held, places, strict=True):
        builder.store(builder.load(register), at, align=4)
