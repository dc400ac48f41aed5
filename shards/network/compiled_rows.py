"""Attention of a step's sequences with one new token each, by a compiled loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shards.compiled.attention import attend_rows
from shards.compiled.floats import bits
from shards.exec.batch import Row
from shards.kv.cache import KvCache

NO_SINKS = np.empty((0, 0), np.float32)


def block_table(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    """The blocks of each of `rows`, with 0 behind them, as int64 [rows, blocks]."""
    table = np.zeros((len(rows), max(len(row.blocks) for row in rows)), np.int64)
    for row, own in zip(rows, table, strict=True):
        own[: len(row.blocks)] = row.blocks
    return table


class CompiledRows:
    """The `rows` of a step over a cache in bfloat16; each sees positions from `first_seen` up to its context."""

    def __init__(self, cache: KvCache, rows: Sequence[Row], first_seen: Sequence[int], scale: float) -> None:
        self._cache, self._scale = cache, np.float32(scale)
        self._tokens = np.array([row.start for row in rows], np.int64)
        self._first_seen = np.array(first_seen, np.int64)
        self._contexts = np.array([row.context_tokens for row in rows], np.int64)
        self._blocks = block_table(rows)

    def __repr__(self) -> str:
        return f"CompiledRows({len(self._tokens)} rows)"

    def attend(self, layer: int, grouped: Tensor, out: Tensor, sunk: Tensor | None) -> None:
        """Fill the rows' tokens in `out` [tokens, kv_heads, group, head_dim] from the queries `grouped`, of that shape.

        `sunk` [kv_heads, group, 1] are scores of a position without a value.
        """
        attend_rows(
            bits(grouped),
            bits(self._cache.data[layer]),
            self._tokens,
            self._blocks,
            self._first_seen,
            self._contexts,
            self._scale,
            NO_SINKS if sunk is None else bits(sunk.squeeze(-1)),
            bits(out),
        )
