"""The memory for keys and values on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shards.kv.keys import BLOCK_TOKENS
from shards.network.config import NetworkConfig

QUANTISED = (torch.int8, torch.float8_e4m3fn)
"""The types that `shards.kv.quantised` stores; each token and head has a float32 scale beside it."""


class Extent(NamedTuple):
    """`tokens` consecutive positions of a sequence that are adjacent in the cache, from `slot` on."""

    slot: int
    tokens: int


class LayeredViews(NamedTuple):
    """One extent in every layer: `keys[layer]` is [kv_heads, head_dim, tokens], `values[layer]` its transpose."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class KvCache:
    """Memory for the keys and values of `blocks` blocks in all layers; the pool decides which sequence owns a block.

    One tensor [layers, k|v, kv_heads, blocks * 64, head_dim]: consecutive blocks are contiguous for each head, so the
    context of a sequence is a few zero-copy views, one per run of consecutive blocks that it was given. The memory
    starts uninitialised, and the system provides it at the first write; only written slots may be read. With latent
    attention the second dimension is 1: one tensor is key and value.
    """

    def __init__(self, config: NetworkConfig, blocks: int, *, dtype: torch.dtype = torch.float32) -> None:
        shape = (config.layers, config.kv_planes, config.kv_heads, blocks * BLOCK_TOKENS, config.head_dim)
        self.blocks = blocks
        self.data = torch.empty(shape, dtype=dtype)
        self._keys_transposed = self.data[:, 0].transpose(2, 3)
        self._values = self.data[:, -1]

    def __repr__(self) -> str:
        layers, _, kv_heads, slots, head_dim = self.data.shape
        return f"KvCache({self.blocks} blocks, {slots=}, {layers=}, {kv_heads=}, {head_dim=}, {self.data.dtype})"

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Write new keys and values to `slots` [tokens] of `layer`.

        `keys_values` [tokens, k|v * kv_heads, head_dim]: first the key heads, then the value heads.
        """
        # one index_copy_ for all heads takes half the time of one per head at 64 tokens
        self.data[layer].flatten(0, 1).index_copy_(1, slots, keys_values.transpose(0, 1))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the keys and values that `read` and `views` return."""
        return self.data.dtype

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """Views [blocks, ...] of everything that the cache stores: the data to copy for a block."""
        layers, planes, kv_heads, _, head_dim = self.data.shape
        return (self.data.view(layers, planes, kv_heads, -1, BLOCK_TOKENS, head_dim).movedim(3, 0),)

    def read(self, layer: int, extents: Sequence[Extent]) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, tokens, head_dim] of all `extents` in order; one extent is not copied."""
        pieces = [self.data[layer, :, :, slot : slot + tokens] for slot, tokens in extents]
        both = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
        return both[0], both[-1]

    def split(self, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and the values [kv_heads, tokens, head_dim] among `keys_values`, as `write` takes them."""
        kv_heads = self.data.shape[2]
        by_head = keys_values.transpose(0, 1)
        return by_head[:kv_heads], by_head[-kv_heads:]

    def slots(self, extents: Sequence[Extent]) -> Tensor:
        """The slots of all `extents` in order, as `write` takes them."""
        return torch.cat([torch.arange(slot, slot + tokens) for slot, tokens in extents])

    def views(self, extent: Extent) -> LayeredViews:
        """The extent in every layer at once, without copying: four calls of torch instead of three per layer."""
        keys = self._keys_transposed.narrow(3, extent.slot, extent.tokens)
        values = self._values.narrow(2, extent.slot, extent.tokens)
        return LayeredViews(keys.unbind(0), values.unbind(0))


def bytes_per_block(config: NetworkConfig, dtype: torch.dtype) -> int:
    """Memory in bytes of the keys and values of 64 positions in all layers, stored as `dtype`, with scales."""
    scale_bytes = torch.float32.itemsize if dtype in QUANTISED else 0
    heads = config.layers * config.kv_planes * config.kv_heads
    return heads * BLOCK_TOKENS * (config.head_dim * dtype.itemsize + scale_bytes)


def extents_of(blocks: Sequence[int], start: int, stop: int) -> tuple[Extent, ...]:
    """The extents of positions `start` up to `stop`, for a sequence that holds `blocks` in this order.

    As few extents as possible, in order of position; none if `start` equals `stop`.
    """
    if start == stop:
        return ()
    first_block = start // BLOCK_TOKENS
    used = tuple(blocks[first_block : (stop - 1) // BLOCK_TOKENS + 1])
    # comparing with a range is 20 times as fast as walking, and the allocator aims for this case
    if used == tuple(range(used[0], used[0] + len(used))):
        return (Extent(used[0] * BLOCK_TOKENS + start % BLOCK_TOKENS, stop - start),)
    extents: list[Extent] = []
    for index, block in enumerate(used, first_block):
        begin, end = max(start, index * BLOCK_TOKENS), min(stop, (index + 1) * BLOCK_TOKENS)
        slot = block * BLOCK_TOKENS + begin % BLOCK_TOKENS
        if extents and extents[-1].slot + extents[-1].tokens == slot:
            extents[-1] = Extent(extents[-1].slot, extents[-1].tokens + end - begin)
        else:
            extents.append(Extent(slot, end - begin))
    return tuple(extents)
