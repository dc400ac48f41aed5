"""Moves of KV to other positions within a GPU's cache, in plain torch: they are bound by memory, as copies are."""

from __future__ import annotations

import torch
from torch import Tensor

from shards.exec.moves import KvMove
from shards.gpu.cache import GpuCache
from shards.kernels.cache import BLOCK_TOKENS
from shards.network.config import NetworkConfig
from shards.network.rope import RotaryEmbedding, Rotation, rotate_in_place, squared_distances


class Blending:
    """Moves KV within `cache`, the memory of a network of `config`. All work joins the device's current stream."""

    def __init__(self, cache: GpuCache, config: NetworkConfig) -> None:
        self._cache, self._config = cache, config
        self._layers = config.layers

    def __repr__(self) -> str:
        return f"Blending({self._cache!r})"

    @torch.inference_mode()
    def blend(self, move: KvMove) -> None:
        """Copy the KV of `move`, keys rotated by the distance."""
        blocks, offsets = self._places(move.target, move.into, move.tokens)
        for layer in range(self._layers):
            self._write(layer, blocks, offsets, self._moved(layer, move))

    @torch.inference_mode()
    def deviations(self, move: KvMove) -> list[float]:
        """The squared distance of each token's KV from what `blend` would copy there; waits for the device."""
        total = torch.zeros(move.tokens, device=self._cache.data.device)
        for layer in range(self._layers):
            computed = self._read(layer, *self._places(move.target, move.into, move.tokens))
            total += squared_distances(self._moved(layer, move).transpose(0, 1), computed.transpose(0, 1))
        return [float(value) for value in total.cpu()]

    def _moved(self, layer: int, move: KvMove) -> Tensor:
        """Keys and values [tokens, 2 * kv_heads, head_dim] of `move`, float32, keys at their new positions."""
        moved = self._read(layer, *self._places(move.source, move.start, move.tokens))
        rotary = RotaryEmbedding(self._config.rope_of(layer), self._config.head_dim)
        cos, sin, _ = rotary.turn(move.into - move.start)
        keys = moved[:, : moved.shape[1] // 2]
        rotate_in_place(keys, Rotation(cos.to(moved.device), sin.to(moved.device)))
        return moved

    def _places(self, blocks: tuple[int, ...], start: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The block and the offset in it of each position."""
        device = self._cache.data.device
        positions = torch.arange(start, start + tokens, device=device)
        ids = torch.tensor(blocks, device=device)
        return ids[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS

    def _read(self, layer: int, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Keys and values [tokens, 2 * kv_heads, head_dim], float32."""
        kv, scales = self._cache.layer(layer)
        if scales is None:
            return kv[blocks, :, :, offsets].float().flatten(1, 2)
        # torch cannot index float8
        stored = kv.view(torch.int8)[blocks, :, :, offsets].view(kv.dtype)
        return (stored.float() * scales[blocks, :, :, offsets].unsqueeze(-1)).flatten(1, 2)

    def _write(self, layer: int, blocks: Tensor, offsets: Tensor, keys_values: Tensor) -> None:
        """Store keys and values as `_read` returns them; in eight bits by the largest number of each head."""
        kv, scales = self._cache.layer(layer)
        numbers = keys_values.view(len(keys_values), 2, -1, keys_values.shape[-1])
        if scales is None:
            kv[blocks, :, :, offsets] = numbers.to(kv.dtype)
            return
        is_integer = not kv.dtype.is_floating_point
        largest = torch.iinfo(kv.dtype).max if is_integer else torch.finfo(kv.dtype).max
        scale = (numbers.abs().amax(-1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
        scales[blocks, :, :, offsets] = scale
        numbers = numbers / scale.unsqueeze(-1)
        stored = (numbers.round() if is_integer else numbers).to(kv.dtype)
        kv.view(torch.int8)[blocks, :, :, offsets] = stored.view(torch.int8)
