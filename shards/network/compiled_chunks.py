"""Attention of a step's sequences with several new tokens, by compiled tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from shards.compiled.chunks import attend_chunks
from shards.compiled.floats import bits
from shards.exec.batch import Row
from shards.kv.cache import KvCache
from shards.network.compiled_rows import NO_SINKS, block_table

_NO_WINDOW = 1 << 30


class CompiledChunks:
    """The `rows` of a step over a cache in bfloat16; each token sees the last `window` positions, None is all."""

    def __init__(self, cache: KvCache, rows: Sequence[Row], window: int | None, scale: float) -> None:
        self._cache, self._scale, self._window = cache, np.float32(scale), _NO_WINDOW if window is None else window
        self._chunks = np.array([(row.start, row.tokens, row.context_tokens) for row in rows], np.int64)
        self._blocks = block_table(rows)

    def __repr__(self) -> str:
        return f"CompiledChunks({len(self._chunks)} chunks)"

    def attend(self, layer: int, grouped: Tensor, out: Tensor, sunk: Tensor | None) -> None:
        """Fill the rows' tokens in `out` as `CompiledRows.attend` does."""
        attend_chunks(
            bits(grouped).view(np.uint32),
            bits(self._cache.data[layer]),
            self._chunks,
            self._blocks,
            self._window,
            self._scale,
            NO_SINKS if sunk is None else bits(sunk.squeeze(-1)),
            bits(out),
        )
