"""The host memory beside a cache, to and from which a `Copier` moves blocks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shards.kv.fingerprint import Layout


class Blocks(Protocol):
    """A cache with movable blocks: its memory as tensors [blocks, ...], one row of each per block."""

    @property
    def planes(self) -> tuple[Tensor, ...]:
        """Keys and values, and scales if there are any."""
        ...


class HostMemory:
    """Room for `slots` blocks of `cache`, each contiguous across layers, so that one block is one copy.

    One tensor [slots, layers, k|v, kv_heads, 64, head_dim] and, for a quantised cache, one for its scales. Copies are
    bit-exact. The system provides the memory of a slot at its first write.
    """

    def __init__(self, cache: Blocks, slots: int) -> None:
        self.slots = slots
        self._device = cache.planes
        self._host = tuple(torch.empty((slots, *plane.shape[1:]), dtype=plane.dtype) for plane in self._device)

    def __repr__(self) -> str:
        return f"HostMemory({self.slots} slots, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Memory of all slots in bytes."""
        return sum(plane.nbytes for plane in self._host)

    @property
    def layout(self) -> Layout:
        """The tensors of a block, in the order of its bytes."""
        return tuple((str(plane.dtype).removeprefix("torch."), tuple(plane.shape[1:])) for plane in self._host)

    def raw(self, slot: int) -> tuple[memoryview, ...]:
        """The bytes of `slot` itself, writable, one piece for each tensor of the layout."""
        return tuple(plane[slot].view(torch.uint8).numpy().reshape(-1).data for plane in self._host)

    def save(self, block: int, slot: int) -> None:
        """Copy device block `block` into `slot`."""
        _copy(self._device, block, self._host, slot)

    def load(self, slot: int, block: int) -> None:
        """Copy `slot` into device block `block`."""
        _copy(self._host, slot, self._device, block)


def _copy(source: tuple[Tensor, ...], row: int, target: tuple[Tensor, ...], into: int) -> None:
    for from_plane, to_plane in zip(source, target, strict=True):
        to_plane[into].copy_(from_plane[row])
