"""The decoder: computes logits from a batch, and writes the new tokens' keys and values to the cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shards.exec.batch import Batch
from shards.exec.moves import KvMove
from shards.kv.cache import KvCache, extents_of
from shards.kv.window_cache import WindowCache
from shards.network.attention import PagedAttention
from shards.network.config import NetworkConfig
from shards.network.group import ALONE, Group
from shards.network.layers import Weights, normalize
from shards.network.rope import RotaryEmbedding, rotate_in_place, squared_distances
from shards.network.views import kv_views


class Decoder:
    """A network of any family, or this process's part of one. The cache holds all state between steps."""

    def __init__(self, config: NetworkConfig, weights: Weights, group: Group = ALONE) -> None:
        self.config, self.weights, self._group = config, weights, group
        self._ropes = [config.rope_of(layer) for layer in range(config.layers)]
        self._rotary = {rope: RotaryEmbedding(rope, config.rotary_dim) for rope in set(self._ropes)}

    def __repr__(self) -> str:
        config = self.config
        return f"Decoder({config.architecture}, {config.layers} layers, hidden {config.hidden_size})"

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KvCache | WindowCache) -> Tensor:
        """Logits, float32 [len(batch.logit_rows), vocab]; afterwards `cache` holds the new tokens' keys and values.

        A row's logits depend only on its own sequence: not on its neighbours, nor on how the sequence was cut into
        steps or which blocks hold it, up to the rounding of a float.
        """
        config, eps = self.config, self.config.rms_norm_eps
        hidden = self._embed(batch.token_ids)
        rotations = {rope: rotary.at(batch.positions, hidden.dtype) for rope, rotary in self._rotary.items()}
        plain, windowed = kv_views(config, batch, cache)
        views = {window: plain if window is None else windowed for window in set(config.windows)}
        attention = {
            window: PagedAttention(view.batch, view.cache, window, scale=config.attention_scale)
            for window, view in views.items()
        }
        last = config.layers - 1
        for index, (layer, window) in enumerate(zip(self.weights.layers, config.windows, strict=True)):
            normal = normalize(hidden, layer.attention_norm, eps)
            projected = layer.attention.project(normal, rotations[self._ropes[index]])
            view = views[window]
            queries, keys_values = (heads.to(view.cache.dtype) for heads in projected)
            view.cache.write(view.places[index], view.batch.slots, keys_values)
            if index == last and not len(batch.logit_rows):
                return hidden.new_empty((0, config.vocab_size), dtype=torch.float32)
            mixed = attention[window].attend(view.places[index], queries, keys_values, sinks=layer.sinks)
            if index == last:
                # past the last attention no token needs another, so only the wanted ones continue
                hidden, mixed = hidden[batch.logit_rows], mixed[batch.logit_rows]
            hidden += normalize(self._group.sum(layer.attention.output(mixed)), layer.attention_after_norm, eps)
            inner = self._group.sum(layer.mlp(normalize(hidden, layer.mlp_norm, eps)))
            hidden += normalize(inner, layer.mlp_after_norm, eps)
        hidden = normalize(hidden, self.weights.norm, eps)
        return self._group.logits(self.weights.head(hidden).float(), config.vocab_size)

    @torch.inference_mode()
    def blend(self, move: KvMove, cache: KvCache) -> None:
        """Copy the KV of `move` within `cache`, keys rotated by the distance."""
        slots = cache.slots(extents_of(move.target, move.into, move.into + move.tokens))
        for layer in range(self.config.layers):
            cache.write(layer, slots, self._moved(layer, move, cache).transpose(0, 1).to(cache.dtype))

    @torch.inference_mode()
    def deviations(self, move: KvMove, cache: KvCache) -> list[float]:
        """The squared distance of each token's KV from what `blend` would copy there, summed over all layers."""
        total = torch.zeros(move.tokens)
        for layer in range(self.config.layers):
            computed = self._read(layer, move.target, move.into, move.tokens, cache)
            total += squared_distances(self._moved(layer, move, cache), computed)
        return [float(value) for value in self._group.sum(total) / self._group.size]

    def _moved(self, layer: int, move: KvMove, cache: KvCache) -> Tensor:
        """Keys and values of `move` as `_read` returns them, keys at their new positions."""
        moved = self._read(layer, move.source, move.start, move.tokens, cache)
        # of a latent key the last numbers turn, of any other all
        turning = moved[: self.config.kv_heads, :, self.config.head_dim - self.config.rotary_dim :]
        rotate_in_place(turning, self._rotary[self._ropes[layer]].turn(move.into - move.start))
        return moved

    def _read(self, layer: int, blocks: tuple[int, ...], start: int, tokens: int, cache: KvCache) -> Tensor:
        """Keys and values [k|v * kv_heads, tokens, head_dim] of these positions, as float32, in memory of their own."""
        planes = cache.read(layer, extents_of(blocks, start, start + tokens))
        return torch.cat(planes[: self.config.kv_planes]).to(torch.float32, copy=True)

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden = functional.embedding(token_ids, self.weights.embedding)
        if self.config.embedding_scale != 1.0:
            # rounded to the embedding's own type, as in training
            hidden = hidden * torch.tensor(self.config.embedding_scale, dtype=hidden.dtype)
        return hidden.to(self.weights.dtype)
