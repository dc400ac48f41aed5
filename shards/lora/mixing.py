"""Adds the changes of a batch's adapters to a network's matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shards.exec.batch import Batch
from shards.lora.adapter import Adapter
from shards.lora.sites import HEAD, site_name
from shards.network.heads import HeadProjection
from shards.network.layers import LayerWeights, Linear, Mlp, Weights
from shards.network.mlp import GatedMlp
from shards.network.moe import MixtureOfExperts

Group = tuple[Adapter, slice | Tensor]
"""An adapter and its tokens: a slice of the batch if they are adjacent, else their indices."""


class AdapterMix:
    """The tokens of each adapter in the batch that is being computed; none between two batches.

    Past its last attention a decoder computes only the tokens that need logits, so matrices get either all tokens of
    the batch or those.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[Group, ...]] = {}

    def __repr__(self) -> str:
        return f"AdapterMix({self._of})"

    @contextmanager
    def computing(self, batch: Batch) -> Iterator[None]:
        """Compute `batch` inside."""
        rows: dict[Adapter, list[Tensor]] = {}
        for row in batch.rows:
            if row.adapter is not None:
                assert isinstance(row.adapter, Adapter), "an adapter for a GPU"
                rows.setdefault(row.adapter, []).append(torch.arange(row.start, row.start + row.tokens))
        if rows:
            tokens = {adapter: torch.cat(spans) for adapter, spans in rows.items()}
            wanted = {adapter: torch.isin(batch.logit_rows, own).nonzero().flatten() for adapter, own in tokens.items()}
            self._of = {len(batch.logit_rows): _groups(wanted), len(batch.token_ids): _groups(tokens)}
        try:
            yield
        finally:
            self._of = {}

    def groups(self, tokens: int) -> tuple[Group, ...]:
        """The groups among all tokens of the batch, or among those that need logits: whichever are so many."""
        return self._of[tokens] if self._of else ()


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """The matrix `base`, changed for the tokens of each adapter of `mix` that changes `site`."""

    base: Linear
    site: str
    mix: AdapterMix

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product for [tokens, in], plus each token's own change: [tokens, out]."""
        outputs = self.base(hidden)
        for adapter, tokens in self.mix.groups(len(hidden)):
            change = adapter.changes.get(self.site)
            if change is None:
                continue
            if isinstance(tokens, slice):
                change.add_to(outputs[tokens], hidden[tokens])
            else:
                own = outputs[tokens]
                change.add_to(own, hidden[tokens])
                outputs[tokens] = own
        return outputs


def adapted(weights: Weights, mix: AdapterMix) -> Weights:
    """`weights` with every matrix that adapters may change bound to `mix`."""
    layers = tuple(_adapted_layer(layer, index, mix) for index, layer in enumerate(weights.layers))
    return replace(weights, layers=layers, head=AdaptedLinear(weights.head, HEAD, mix))


def _adapted_layer(layer: LayerWeights, index: int, mix: AdapterMix) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, HeadProjection):
        attention = replace(
            attention,
            query_key_value=AdaptedLinear(attention.query_key_value, site_name(index, "query_key_value"), mix),
            linear_out=AdaptedLinear(attention.linear_out, site_name(index, "output"), mix),
        )
    if isinstance(mlp, MixtureOfExperts):
        mlp = replace(mlp, shared=None if mlp.shared is None else _adapted_mlp(mlp.shared, index, "shared_", mix))
    else:
        mlp = _adapted_mlp(mlp, index, "", mix)
    return replace(layer, attention=attention, mlp=mlp)


def _adapted_mlp(mlp: Mlp, index: int, prefix: str, mix: AdapterMix) -> Mlp:
    if not isinstance(mlp, GatedMlp):
        return mlp
    return replace(
        mlp,
        gate_up=AdaptedLinear(mlp.gate_up, site_name(index, f"{prefix}gate_up"), mix),
        down=AdaptedLinear(mlp.down, site_name(index, f"{prefix}down"), mix),
    )


def _groups(tokens: dict[Adapter, Tensor]) -> tuple[Group, ...]:
    return tuple((adapter, _places(own)) for adapter, own in tokens.items() if len(own))


def _places(tokens: Tensor) -> slice | Tensor:
    """`tokens`, ascending, as a slice if they are adjacent."""
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else tokens
