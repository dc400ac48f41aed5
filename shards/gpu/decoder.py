"""The decoder on the GPU's kernels: takes a step's inputs, returns logits, and keeps keys and values in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from shards.exec.batch import Row
from shards.gpu.adapters import AdapterMemory, adapted
from shards.gpu.cache import GpuCache
from shards.gpu.weights import GpuLayer, GpuWeights
from shards.kernels.gather_prefill import Dense, gather_prefill
from shards.kernels.kv_write import HeadNorm, Rotation, kv_write
from shards.kernels.low_rank import AdaptedRows
from shards.kernels.norm import rms_norm
from shards.kernels.paged_decode import DecodePlan, paged_decode
from shards.kernels.paged_prefill import PrefillPlan, paged_prefill
from shards.lora.sites import HEAD
from shards.network.config import NetworkConfig, Rope
from shards.network.group import ALONE, Group
from shards.network.rope import attention_factors, inverse_frequencies


@dataclass(frozen=True, slots=True)
class Decodes:
    """The sequences with one new token each, which are the first tokens of a step.

    tables [sequences, pages], context_tokens [sequences], int32; `plans` by window, filled from these contexts.
    window_tables are those of layers with a window, which may have pages of their own.
    """

    tables: Tensor
    window_tables: Tensor
    context_tokens: Tensor
    plans: Mapping[int | None, DecodePlan]


@dataclass(frozen=True, slots=True)
class Long:
    """The last sequences of a step, with chunks that are long enough for dense attention in layers without a window.
    The last `tiles` tiles of the step's plan are theirs. All numbers are on the host.
    """

    new_tokens: list[int]
    context_tokens: list[int]
    tiles: int

    @classmethod
    def of(cls, rows: Sequence[Row], *, tile_tokens: int) -> Long:
        """Those of `rows`."""
        new = [row.tokens for row in rows]
        return cls(new, [row.context_tokens for row in rows], sum(-(-tokens // tile_tokens) for tokens in new))


@dataclass(frozen=True, slots=True)
class Prefills:
    """The sequences with several new tokens: those that have tiles in `plan`. Tables and the plan's other numbers are
    of all sequences of the step. window_tables as in `Decodes`.
    """

    tables: Tensor
    window_tables: Tensor
    plan: PrefillPlan
    long: Long | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step on the device: integers [tokens], first those of `decodes`, then those of chunks.

    `wanted` [wanted] are the indices of the tokens that need logits; None means all of them. `window_slots` are those
    of layers with a window. `adapted` are the tokens with adapters, among all and among the wanted ones; None if no
    token has one.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    window_slots: Tensor
    decodes: Decodes | None
    prefills: Prefills | None
    wanted: Tensor | None
    adapted: tuple[AdaptedRows, AdaptedRows] | None = None


class GpuDecoder:
    """A network of a family that `shards.gpu.support` names. The cache holds all state between steps.

    `dense` is the attention for long chunks; None uses the paged kernel for all. `config` and `weights` are those of
    this process's part if there is a `group`. `slots` have the adapters of rows, once it was bound to them.
    """

    def __init__(
        self, config: NetworkConfig, weights: GpuWeights, *, dense: Dense | None = None, group: Group = ALONE
    ) -> None:
        self.config, self.weights, self.dense, self.group = config, weights, dense, group
        self.slots: AdapterMemory | None = None
        self.device = weights.embedding.device
        ropes = [config.rope_of(layer) for layer in range(config.layers)]
        tables = {rope: rotation_table(rope, config, self.device) for rope in set(ropes)}
        self._rotations = [tables[rope] for rope in ropes]
        self._growth = query_growth(config, self.device)
        self._norms = [self._head_norm(layer) for layer in weights.layers]

    def __repr__(self) -> str:
        config = self.config
        return f"GpuDecoder({config.architecture}, {config.layers} layers, {self.weights.embedding.dtype})"

    def bind(self, slots: AdapterMemory) -> None:
        """Compute rows with adapters from now on, which are in `slots`."""
        self.slots, self.weights = slots, adapted(self.weights, slots)

    @torch.inference_mode()
    def forward(self, inputs: Inputs, cache: GpuCache, *, out: Tensor | None = None) -> Tensor:
        """Logits [wanted, vocabulary] in the weights' type, in `out` if it is given.

        Afterwards the keys and values of all new tokens are in `cache`.
        """
        epsilon, last = self.config.rms_norm_eps, self.config.layers - 1
        hidden, residual = self._embed(inputs.token_ids), None
        self._adapt(inputs, wanted=False)
        for index, layer in enumerate(self.weights.layers):
            normal, stream = _joined(hidden, layer.attention_norm, epsilon, residual)
            queries = self._write(index, normal, inputs, cache)
            if index == last and inputs.wanted is not None and not len(inputs.wanted):
                return hidden.new_empty(0, self.config.vocab_size)
            mixed = self._attend(index, queries, inputs, cache).flatten(1)
            if index == last and inputs.wanted is not None:
                # past the last attention no token needs another, so only the wanted ones continue
                mixed, stream = mixed.index_select(0, inputs.wanted), stream.index_select(0, inputs.wanted)
                self._adapt(inputs, wanted=True)
            hidden = _after(self.group.sum(layer.output(mixed)), layer.attention_after_norm, epsilon)
            normal, residual = _joined(hidden, layer.mlp_norm, epsilon, stream)
            hidden = _after(self.group.sum(layer.mlp(normal)), layer.mlp_after_norm, epsilon)
        normal, _ = rms_norm(hidden, self.weights.norm, epsilon=epsilon, residual=residual)
        if self.group.size == 1:
            logits = torch.mm(normal, self.weights.head.mT, out=out)
            if self.slots is not None:
                self.slots.add(HEAD, logits, normal)
            return logits
        return self.group.logits(torch.mm(normal, self.weights.head.mT), self.config.vocab_size, out=out)

    def _adapt(self, inputs: Inputs, *, wanted: bool) -> None:
        """The products that follow are those of all tokens, or of the `wanted` ones."""
        if self.slots is not None:
            self.slots.computing(None if inputs.adapted is None else inputs.adapted[wanted])

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden, scale = functional.embedding(token_ids, self.weights.embedding), self.config.embedding_scale
        # rounded to the embedding's own type, as in training; on the host, because a graph may not copy from there
        return hidden if scale == 1.0 else hidden * torch.tensor(scale, dtype=hidden.dtype).item()

    def _write(self, index: int, normal: Tensor, inputs: Inputs, cache: GpuCache) -> Tensor:
        """Write this layer's keys and values to the cache; returns the rotated queries [tokens, heads, head_dim]."""
        config, layer = self.config, self.weights.layers[index]
        projected = layer.query_key_value(normal)
        if config.wide_norm:
            projected = _normalised(projected, layer, config, self.group)
        split = torch.split(
            projected.view(len(normal), -1, config.head_dim), [config.heads, config.kv_heads, config.kv_heads], dim=1
        )
        kv, scales = cache.layer(index)
        places = (inputs.positions, inputs.slots if config.windows[index] is None else inputs.window_slots)
        queries = kv_write(
            (split[0], split[1], split[2]),
            places,
            kv=kv,
            rotation=self._rotations[index],
            norm=self._norms[index],
            scales=scales,
        )
        if self._growth is None:
            return queries
        return queries * self._growth.index_select(0, inputs.positions)[:, None, None].to(queries.dtype)

    def _attend(self, index: int, queries: Tensor, inputs: Inputs, cache: GpuCache) -> Tensor:
        """[tokens, heads, head_dim]: decoding rows and prefilling rows in separate kernels, never one for both."""
        kv, scales = cache.layer(index)
        window = self.config.windows[index]
        scale, sinks = self.config.attention_scale, self.weights.layers[index].sinks
        out = queries.new_empty(queries.shape)
        if inputs.decodes is not None:
            decodes, rows = inputs.decodes, len(inputs.decodes.context_tokens)
            tables = decodes.tables if window is None else decodes.window_tables
            contexts, plan = decodes.context_tokens, decodes.plans[window]
            paged_decode(
                queries[:rows],
                kv,
                tables=tables,
                context_tokens=contexts,
                plan=plan,
                scales=scales,
                scale=scale,
                sinks=sinks,
                out=out[:rows],
            )
        if inputs.prefills is not None:
            # behind the decoding rows: in a graph these may be more than there are, and the rest are chunks
            self._prefill(queries, kv, inputs.prefills, window=window, scales=scales, sinks=sinks, out=out)
        return out

    def _prefill(
        self,
        queries: Tensor,
        kv: Tensor,
        prefills: Prefills,
        *,
        window: int | None,
        scales: Tensor | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        plan, long, scale = prefills.plan, None if window is not None else prefills.long, self.config.attention_scale
        paged_prefill(
            queries,
            kv,
            tables=prefills.tables if window is None else prefills.window_tables,
            plan=plan if long is None else replace(plan, tiles=plan.tiles[: -long.tiles]),
            window=window,
            scales=scales,
            scale=scale,
            sinks=sinks,
            out=out,
        )
        if long is None or self.dense is None:
            return
        rows, tokens = len(long.new_tokens), sum(long.new_tokens)
        gather_prefill(
            queries[-tokens:],
            kv,
            tables=prefills.tables[-rows:],
            plan=replace(plan, context_tokens=plan.context_tokens[-rows:]),
            new_tokens=long.new_tokens,
            context_tokens=long.context_tokens,
            scales=scales,
            scale=scale,
            sinks=sinks,
            dense=self.dense,
            out=out[-tokens:],
        )

    def _head_norm(self, layer: GpuLayer) -> HeadNorm | None:
        if layer.query_norm is None or layer.key_norm is None or self.config.wide_norm:
            return None
        return HeadNorm(layer.query_norm, layer.key_norm, self.config.rms_norm_eps)


def _joined(hidden: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Input of the next part, and the residual stream with `hidden`; both the stream if there is no norm before it."""
    if weight is not None:
        return rms_norm(hidden, weight, epsilon=epsilon, residual=residual)
    stream = hidden if residual is None else hidden + residual
    return stream, stream


def _after(hidden: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return hidden if weight is None else rms_norm(hidden, weight, epsilon=epsilon)[0]


def _normalised(projected: Tensor, layer: GpuLayer, config: NetworkConfig, group: Group) -> Tensor:
    """`projected` with all queries of a token normalised together, and all its keys: those of all parts."""
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    queries, keys, values = torch.split(projected, [query, key_value, key_value], dim=1)
    eps = config.rms_norm_eps
    if group.size == 1:
        sides = [_after(queries, layer.query_norm, eps), _after(keys, layer.key_norm, eps)]
    else:
        squares = torch.stack([side.float().square().mean(1) for side in (queries, keys)], 1)
        factors = torch.rsqrt(group.sum(squares) / group.size + eps)
        assert layer.query_norm is not None, "a wide norm has weights"
        assert layer.key_norm is not None, "a wide norm has weights"
        sides = [
            (side.float() * factors[:, index, None] * weight).to(side.dtype)
            for index, (side, weight) in enumerate(((queries, layer.query_norm), (keys, layer.key_norm)))
        ]
    return torch.cat((*sides, values), dim=1)


def query_growth(config: NetworkConfig, device: torch.device) -> Tensor | None:
    """The factors on queries at all positions, float32 [max_positions]; None if all are 1."""
    if not config.rope.query_growth:
        return None
    periods = torch.arange(config.max_positions, device=device) // config.rope.original_positions
    return 1.0 + config.rope.query_growth * periods.float().log1p()


def rotation_table(rope: Rope, config: NetworkConfig, device: torch.device) -> Rotation:
    """Cosines and sines of all positions, float32 [max_positions, head_dim / 2]: 64 MiB at 131,072 positions of 128."""
    positions = torch.arange(config.max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * inverse_frequencies(rope, config.head_dim).to(device)
    factor = attention_factors(rope, config.head_dim)
    factor = torch.ones(()) if factor is None else factor
    return Rotation(angles.cos() * factor.to(device), angles.sin() * factor.to(device))
