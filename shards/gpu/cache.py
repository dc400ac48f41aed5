"""The memory for keys and values on the GPU, and the number of blocks that fit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shards.kernels.cache import BLOCK_TOKENS, QUANTISED, has_kernels_for
from shards.kernels.launch import Gpu
from shards.network.config import NetworkConfig

MOST_SHARE = 0.97
"""Share of a GPU's free memory that may be planned for: allocators round up, and kernels are loaded on first use."""

CONTEXT_BYTES = 600 * 2**20
"""Memory of a process's CUDA context and its loaded kernels, which torch does not count."""

_SCALE_BYTES = 4


class GpuMemory(NamedTuple):
    """Bytes of one GPU: `free` ones and the `total`, and what torch holds of it in this process (`own`)."""

    free: int
    total: int
    own: int


class GpuCache:
    """Memory for the keys and values of `blocks` blocks in all layers, and for one more block for padding.

    data [blocks + 1, layers, k|v, kv_heads, 64, head_dim]: a block is one piece of memory, so it moves to the host in
    one copy, and one head's page is one tile of a kernel. scales [blocks + 1, layers, k|v, kv_heads, 64] float32, if
    `dtype` is int8 or float8_e4m3fn. Rows of padding write to the last block and read nothing.

    With `pages` the layers with a window are not in these tensors, but in as many pages of their own, and one more.
    """

    def __init__(
        self,
        config: NetworkConfig,
        blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pages: int | None = None,
    ) -> None:
        self.blocks, self.pages = blocks, pages
        self._windowed: GpuCache | None = None
        self._windows = config.windows
        self._places = tuple(range(config.layers)) if pages is None else config.kv_places
        if pages is not None:
            self._windowed = GpuCache(config.of_layers(windowed=True), pages, dtype=dtype, device=device)
            config = config.of_layers(windowed=False)
        shape = (blocks + 1, config.layers, 2, config.kv_heads, BLOCK_TOKENS)
        self.data = torch.empty(*shape, config.head_dim, dtype=dtype, device=device)
        self.scales = torch.empty(shape, dtype=torch.float32, device=device) if dtype in QUANTISED else None

    def __repr__(self) -> str:
        _, layers, _, kv_heads, _, head_dim = self.data.shape
        beside = "" if self._windowed is None else f", windowed={self._windowed!r}"
        return f"GpuCache({self.blocks} blocks, {layers=}, {kv_heads=}, {head_dim=}, {self.data.dtype}{beside})"

    @property
    def padding_slot(self) -> int:
        """The slot for keys and values that are never read."""
        return self.blocks * BLOCK_TOKENS

    @property
    def mapped(self) -> int:
        """The entries of a map from blocks to pages, padding included; 0 without pages."""
        return 0 if self.pages is None else self.blocks + 1

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """The memory as tensors with one row per block, for copies to the host and back."""
        assert self.pages is None, "blocks do not have the KV of layers with a window"
        return (self.data,) if self.scales is None else (self.data, self.scales)

    def layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """One layer's (kv, scales), as the kernels take them; by page if it has a window and there are pages."""
        place = self._places[index]
        if self._windowed is not None and self._windows[index] is not None:
            return self._windowed.layer(place)
        return self.data[:, place], None if self.scales is None else self.scales[:, place]


def require_kv_type(dtype: torch.dtype, gpu: Gpu) -> None:
    """Raise ValueError if `gpu` has no kernels for KV of this type."""
    if not has_kernels_for(dtype, gpu):
        raise ValueError(f"kv_dtype is fp8, and {gpu.chip.name} has no e4m3; use int8, or auto")


def bytes_per_block(config: NetworkConfig, dtype: torch.dtype) -> int:
    """Memory in bytes of the keys and values of 64 positions in all layers, scales included."""
    scale_bytes = _SCALE_BYTES if dtype in QUANTISED else 0
    return 2 * config.layers * config.kv_heads * BLOCK_TOKENS * (config.head_dim * dtype.itemsize + scale_bytes)


def working_bytes(config: NetworkConfig, *, batch_tokens: int, rows: int, dtype: torch.dtype) -> int:
    """Upper bound of the bytes that a step of `batch_tokens` tokens and `rows` rows of logits needs beside weights and
    cache.

    Residual stream, norm, projections and MLP of one layer at a time; the gathered pages of one whole context, read
    and split for dense attention; logits and their float32 copy.
    """
    wide = 4 * config.hidden_size + 2 * (config.heads + 2 * config.kv_heads) * config.head_dim
    per_token = (wide + _inner_numbers(config)) * dtype.itemsize
    gathered = 4 * config.kv_heads * config.max_positions * config.head_dim * dtype.itemsize
    logits = rows * config.vocab_size * (dtype.itemsize + 2 * _SCALE_BYTES)
    return batch_tokens * per_token + gathered + logits


def _inner_numbers(config: NetworkConfig) -> int:
    """The numbers of a token inside the widest MLP, or beside those of the shared one in all of its experts."""
    dense, experts = 3 * config.intermediate_size, config.experts
    if experts is None:
        return dense
    # the sum over experts is float32
    mixed = experts.chosen * (3 * experts.inner + 2 * config.hidden_size) + 3 * experts.shared_inner
    return max(dense, mixed)


def room_bytes(memory: GpuMemory, working: int, *, shards: int = 1) -> int:
    """The bytes that the cache may take beside `working` bytes of a step, if `shards` shards share the GPU.

    Shards that start together may not have taken their memory yet, so each also keeps to its part of the total.
    Raises ValueError if nothing is left.
    """
    usable = memory.free * MOST_SHARE
    if shards > 1:
        usable = min(usable, memory.total * MOST_SHARE / shards - CONTEXT_BYTES - memory.own)
    room = int(usable) - working
    if room <= 0:
        part = "" if shards == 1 else f" for each of {shards} shards"
        usable_gib, working_gib = max(0.0, usable) / 2**30, working / 2**30
        raise ValueError(
            f"{usable_gib:.1f} GiB of the GPU are usable{part} and a step needs {working_gib:.1f}: "
            "nothing is left for KV"
        )
    return room
