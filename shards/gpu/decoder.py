"""The decoder on the GPU's kernels: takes a step's inputs, returns logits, and keeps keys and values in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shards.gpu.cache import GpuCache
from shards.gpu.weights import GpuLayer, GpuWeights, Matrix
from shards.kernels.gather_prefill import Dense, gather_prefill
from shards.kernels.kv_write import HeadNorm, Rotation, kv_write
from shards.kernels.norm import rms_norm
from shards.kernels.paged_decode import DecodePlan, paged_decode
from shards.kernels.paged_prefill import PrefillPlan, paged_prefill
from shards.kernels.silu_mul import silu_mul
from shards.network.config import NetworkConfig
from shards.network.rope import attention_factors, inverse_frequencies


@dataclass(frozen=True, slots=True)
class Decodes:
    """The sequences with one new token each, which are the first tokens of a step.

    tables [sequences, pages], context_tokens [sequences], int32; `plans` by window, filled from these contexts.
    """

    tables: Tensor
    context_tokens: Tensor
    plans: Mapping[int | None, DecodePlan]


@dataclass(frozen=True, slots=True)
class Prefills:
    """The sequences with several new tokens, one after the other. new_tokens and context_tokens are on the host.

    `is_dense`: their chunks are long enough for dense attention to pay off in layers without a window.
    """

    tables: Tensor
    plan: PrefillPlan
    new_tokens: list[int]
    context_tokens: list[int]
    is_dense: bool


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step on the device: integers [tokens], first those of `decodes`, then those of each of `prefills`.

    `wanted` [wanted] are the indices of the tokens that need logits; None means all of them.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decodes: Decodes | None
    prefills: tuple[Prefills, ...]
    wanted: Tensor | None


class GpuDecoder:
    """A network of the Llama, Mistral, Qwen2 or Qwen3 family. The cache holds all state between steps.

    `dense` is the attention for long chunks; None uses the paged kernel for all.
    """

    def __init__(self, config: NetworkConfig, weights: GpuWeights, *, dense: Dense | None = None) -> None:
        self.config, self.weights, self.dense = config, weights, dense
        self.device = weights.embedding.device
        self._rotation = rotation_table(config, self.device)
        self._norms = [self._head_norm(layer) for layer in weights.layers]

    def __repr__(self) -> str:
        config = self.config
        return f"GpuDecoder({config.architecture}, {config.layers} layers, {self.weights.embedding.dtype})"

    @torch.inference_mode()
    def forward(self, inputs: Inputs, cache: GpuCache, *, out: Tensor | None = None) -> Tensor:
        """Logits [wanted, vocabulary] in the weights' type, in `out` if it is given.

        Afterwards the keys and values of all new tokens are in `cache`.
        """
        epsilon, last = self.config.rms_norm_eps, self.config.layers - 1
        hidden, residual = functional.embedding(inputs.token_ids, self.weights.embedding), None
        for index, layer in enumerate(self.weights.layers):
            normal, stream = rms_norm(hidden, layer.attention_norm, epsilon=epsilon, residual=residual)
            queries = self._write(index, normal, inputs, cache)
            if index == last and inputs.wanted is not None and not len(inputs.wanted):
                return hidden.new_empty(0, self.config.vocab_size)
            mixed = self._attend(index, queries, inputs, cache).flatten(1)
            if index == last and inputs.wanted is not None:
                # past the last attention no token needs another, so only the wanted ones continue
                mixed, stream = mixed.index_select(0, inputs.wanted), stream.index_select(0, inputs.wanted)
            hidden = _linear(mixed, layer.output)
            normal, residual = rms_norm(hidden, layer.mlp_norm, epsilon=epsilon, residual=stream)
            inner = silu_mul(_linear(normal, layer.gate_up))
            hidden = _linear(inner, layer.down)
        normal, _ = rms_norm(hidden, self.weights.norm, epsilon=epsilon, residual=residual)
        return torch.mm(normal, self.weights.head.mT, out=out)

    def _write(self, index: int, normal: Tensor, inputs: Inputs, cache: GpuCache) -> Tensor:
        """Write this layer's keys and values to the cache; returns the rotated queries [tokens, heads, head_dim]."""
        config, layer = self.config, self.weights.layers[index]
        projected = _linear(normal, layer.query_key_value)
        split = torch.split(
            projected.view(len(normal), -1, config.head_dim), [config.heads, config.kv_heads, config.kv_heads], dim=1
        )
        kv, scales = cache.layer(index)
        places = (inputs.positions, inputs.slots)
        return kv_write(
            (split[0], split[1], split[2]),
            places,
            kv=kv,
            rotation=self._rotation,
            norm=self._norms[index],
            scales=scales,
        )

    def _attend(self, index: int, queries: Tensor, inputs: Inputs, cache: GpuCache) -> Tensor:
        """[tokens, heads, head_dim]: decoding rows and prefilling rows in separate kernels, never one for both."""
        kv, scales = cache.layer(index)
        window, parts, start = self.config.windows[index], [], 0
        if inputs.decodes is not None:
            decodes, start = inputs.decodes, len(inputs.decodes.context_tokens)
            tables, contexts, plan = decodes.tables, decodes.context_tokens, decodes.plans[window]
            rows = queries[:start]
            parts.append(paged_decode(rows, kv, tables=tables, context_tokens=contexts, plan=plan, scales=scales))
        for prefills in inputs.prefills:
            stop = start + sum(prefills.new_tokens)
            parts.append(self._prefill(queries[start:stop], kv, prefills, window=window, scales=scales))
            start = stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefill(
        self, queries: Tensor, kv: Tensor, prefills: Prefills, *, window: int | None, scales: Tensor | None
    ) -> Tensor:
        if self.dense is None or not prefills.is_dense or window is not None:
            return paged_prefill(queries, kv, tables=prefills.tables, plan=prefills.plan, window=window, scales=scales)
        return gather_prefill(
            queries,
            kv,
            tables=prefills.tables,
            plan=prefills.plan,
            new_tokens=prefills.new_tokens,
            context_tokens=prefills.context_tokens,
            scales=scales,
            dense=self.dense,
        )

    def _head_norm(self, layer: GpuLayer) -> HeadNorm | None:
        if layer.query_norm is None or layer.key_norm is None:
            return None
        return HeadNorm(layer.query_norm, layer.key_norm, self.config.rms_norm_eps)


def _linear(hidden: Tensor, matrix: Matrix) -> Tensor:
    return functional.linear(hidden, matrix.weight, matrix.bias)


def rotation_table(config: NetworkConfig, device: torch.device) -> Rotation:
    """Cosines and sines of all positions, float32 [max_positions, head_dim / 2]: 64 MiB at 131,072 positions of 128."""
    positions = torch.arange(config.max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * inverse_frequencies(config.rope, config.head_dim).to(device)
    factor = attention_factors(config.rope, config.head_dim)
    factor = torch.ones(()) if factor is None else factor
    return Rotation(angles.cos() * factor.to(device), angles.sin() * factor.to(device))
