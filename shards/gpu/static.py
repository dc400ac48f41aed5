"""Buffers of steps at fixed addresses, because a captured graph reads fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shards.gpu.cache import GpuCache
from shards.gpu.layout import FieldShape, Size, decode_layout, mixed_layout
from shards.kernels.cache import BLOCK_TOKENS
from shards.kernels.paged_decode import SPLIT_TOKENS, DecodePlan, most_readers, splits_of
from shards.network.config import NetworkConfig

LEAST_BYTES = 128 * 2**20
"""Room for the results of splits, where that many can be: also rows that share their blocks have results of their own.
With 32 heads of 128 dimensions, 256 rows of 16k tokens."""


class StaticBuffers:
    """Room for decoding steps of up to `rows` rows, and for other steps of these `sizes`.

    `tables` [rows, pages] is as wide as the longest context; `logits` [rows, vocabulary] are of type `dtype`; splits
    have room for a full cache without shared blocks, for LEAST_BYTES of results, or for all that a window shows. Steps
    that need more are computed in buffers of their own. `adapted` are the fields of rows with adapters.
    """

    def __init__(
        self,
        config: NetworkConfig,
        cache: GpuCache,
        rows: int,
        *,
        sizes: Sequence[Size] = (),
        device: torch.device,
        dtype: torch.dtype,
        adapted: tuple[FieldShape, ...] = (),
    ) -> None:
        pages = -(-config.max_positions // BLOCK_TOKENS)
        # and one of padding
        self.tables = torch.zeros(rows + 1, pages, dtype=torch.int32, device=device)
        words = [mixed_layout(size, pages, cache.mapped).words for size in sizes]
        words.append(decode_layout(rows, pages, cache.mapped, adapted).words)
        self._buffer = torch.zeros(max(words), dtype=torch.int32, device=device)
        # one for all graphs: separate ones would take a gigabyte in total for a large vocabulary
        self.logits = torch.empty(rows, config.vocab_size, dtype=dtype, device=device)
        full = -(-cache.blocks * BLOCK_TOKENS // SPLIT_TOKENS) + rows
        least = LEAST_BYTES // (4 * config.heads * (config.head_dim + 1))
        longest = rows * -(-config.max_positions // SPLIT_TOKENS)
        room = min(max(full, least), longest)
        self._rooms = {window: min(room, _most_splits(rows, window, room)) for window in set(config.windows)}
        self._plans = {window: a_plan(config, rows, room, window, device) for window, room in self._rooms.items()}

    def __repr__(self) -> str:
        return f"StaticBuffers({len(self.logits)} rows, splits by window {self._rooms})"

    def has_room(self, contexts: Sequence[int]) -> bool:
        """Do the contexts of decoding rows fit? Checked before each step: splits beyond the room would be lost."""
        if max(contexts, default=0) > self.tables.shape[1] * BLOCK_TOKENS:
            return False
        # an upper bound: nearly always sufficient, and ten times as fast as counting
        bound = sum(contexts) // SPLIT_TOKENS + len(contexts)
        return all(
            min(bound, _most_splits(len(contexts), window, bound)) <= room or splits_of(contexts, window=window) <= room
            for window, room in self._rooms.items()
        )

    def input(self, words: int) -> Tensor:
        """The memory for the first `words` words of a step's metadata."""
        return self._buffer[:words]

    def plans(self, rows: int) -> dict[int | None, DecodePlan]:
        """By window, a plan for exactly `rows` rows."""
        return {
            window: replace(plan, first_splits=plan.first_splits[: rows + 1]) for window, plan in self._plans.items()
        }


def a_plan(config: NetworkConfig, rows: int, splits: int, window: int | None, device: torch.device) -> DecodePlan:
    """A plan for `rows` rows with `splits` splits; those without a window are read by several rows at once."""
    readers = most_readers(config.heads // config.kv_heads) if window is None else 1
    size = {"heads": config.heads, "dim": config.head_dim, "readers": readers}
    return DecodePlan.with_room(rows, splits, **size, device=device, window=window)


def _most_splits(rows: int, window: int | None, otherwise: int) -> int:
    """The most splits that `rows` rows with a window can have; without a window `otherwise`."""
    return otherwise if window is None else rows * (-(-window // SPLIT_TOKENS) + 1)
