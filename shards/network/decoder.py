"""The decoder: computes logits from a batch, and writes the new tokens' keys and values to the cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shards.exec.batch import Batch
from shards.kv.cache import KvCache
from shards.network.attention import PagedAttention
from shards.network.config import NetworkConfig
from shards.network.layers import LayerWeights, Weights, gated_mlp, normalize, normalize_heads_in_place
from shards.network.rope import RotaryEmbedding, Rotation, rotate_in_place


class Decoder:
    """A network of the Llama, Mistral, Qwen2 or Qwen3 family. The cache holds all state between steps."""

    def __init__(self, config: NetworkConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self._rotary = RotaryEmbedding(config.rope, config.head_dim)

    def __repr__(self) -> str:
        config = self.config
        return f"Decoder({config.architecture}, {config.layers} layers, hidden {config.hidden_size})"

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KvCache) -> Tensor:
        """Logits, float32 [len(batch.logit_rows), vocab]; afterwards `cache` holds the new tokens' keys and values.

        A row's logits depend only on its own sequence: not on its neighbours, nor on how the sequence was cut into
        steps or which blocks hold it, up to the rounding of a float.
        """
        hidden = functional.embedding(batch.token_ids, self.weights.embedding).to(self.weights.norm.dtype)
        rotation = self._rotary.at(batch.positions, hidden.dtype)
        attention = {window: PagedAttention(batch, cache, window) for window in set(self.config.windows)}
        last = self.config.layers - 1
        for index, (layer, window) in enumerate(zip(self.weights.layers, self.config.windows, strict=True)):
            heads = self._project(hidden, layer, rotation).to(cache.dtype)
            queries, keys_values = torch.split(heads, [self.config.heads, 2 * self.config.kv_heads], 1)
            cache.write(index, batch.slots, keys_values)
            if index == last and not len(batch.logit_rows):
                return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
            mixed = attention[window].attend(index, queries, keys_values).flatten(1)
            if index == last:
                # past the last attention no token needs another, so only the wanted ones continue
                hidden, mixed = hidden[batch.logit_rows], mixed[batch.logit_rows]
            hidden += layer.output(mixed)
            hidden += gated_mlp(normalize(hidden, layer.mlp_norm, self.config.rms_norm_eps), layer)
        hidden = normalize(hidden, self.weights.norm, self.config.rms_norm_eps)
        return self.weights.head(hidden).float()

    def _project(self, hidden: Tensor, layer: LayerWeights, rotation: Rotation) -> Tensor:
        """Queries, keys and values [tokens, heads + 2 * kv_heads, head_dim]; queries and keys are rotated."""
        config = self.config
        normalized = normalize(hidden, layer.attention_norm, config.rms_norm_eps)
        heads = layer.query_key_value(normalized).view(len(hidden), -1, config.head_dim)
        queries_keys = heads[:, : config.heads + config.kv_heads]
        if layer.query_key_norm is not None:
            normalize_heads_in_place(queries_keys, layer.query_key_norm, config.rms_norm_eps)
        rotate_in_place(queries_keys, rotation)
        return heads
