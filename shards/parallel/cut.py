"""Builds the weights of one part of a network, layer by layer: the whole network is never in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from shards.network.errors import UnsupportedCheckpoint
from shards.network.group import Group
from shards.network.heads import HeadProjection
from shards.network.latent import LatentProjection
from shards.network.layers import DenseLinear, LayerWeights, Linear, Mlp, Projection, Weights
from shards.network.mlp import GatedMlp
from shards.network.moe import MixtureOfExperts
from shards.network.tensors import Builder, Form
from shards.parallel.part import Part
from shards.quant.linear import QuantisedLinear, stored_linear
from shards.quant.matrix import QuantisedMatrix, StoredMatrix, select_columns, select_rows


@dataclass(frozen=True, slots=True)
class PartBuilder(Builder):
    """A `Builder` of one `part`, which `group` adds to the others. Matrices are cut as they are read, and then stored
    as `stored`: a product of several parts is a sum, and a bias is in the first of them alone.
    """

    group: Group
    part: Part
    stored: Form

    @classmethod
    def of(cls, builder: Builder, group: Group, part: Part) -> PartBuilder:
        """The builder of this process's `part` of the weights that `builder` makes."""
        as_read = Form(partial(stored_linear, dtype=builder.source.dtype), is_wide=builder.form.is_wide)
        return cls(builder.config, builder.family, builder.source, as_read, group, part, builder.form)

    def weights(self) -> Weights:
        """The weights of this part. The embedding is whole: a step reads only the rows of its tokens."""
        weights = Builder.weights(self)
        return replace(weights, head=self.stored.linear([self._head(_matrix(weights.head))], None))

    def layer(self, index: int) -> LayerWeights:
        """This part of one layer."""
        layer = Builder.layer(self, index)
        own = self.part.heads(self.config)
        return replace(
            layer,
            attention=self._attention(layer.attention),
            mlp=self._mlp(layer.mlp),
            sinks=None if layer.sinks is None else layer.sinks[own.start : own.stop].clone(),
        )

    def own_experts(self, count: int) -> range:
        """The numbers of the experts of this part: others are not read."""
        return self.part.experts(count)

    def _head(self, whole: StoredMatrix) -> StoredMatrix:
        count = self.config.vocab_size
        own, each = self.part.vocabulary(count), len(Part(0, self.part.size).vocabulary(count))
        if isinstance(whole, Tensor) and len(own) == each:
            rows = whole[own.start : own.stop]
            # a tied head is a view of the embedding, and any other is copied, so that the rest can be freed
            return rows if self.config.tied_head else rows.clone()
        # any rows fill up the last parts: their logits are dropped
        return select_rows(whole, torch.arange(own.start, own.start + each).clamp(max=count - 1))

    def _attention(self, attention: Projection) -> Projection:
        if isinstance(attention, LatentProjection):
            return self._latent(attention)
        assert isinstance(attention, HeadProjection), "attention has heads, or is latent"
        own, kv, dim = self.part.heads(self.config), self.part.kv_heads(self.config), self.config.head_dim
        queries, keys = self.config.heads, self.config.kv_heads
        placed = [*own, *(queries + head for head in kv)]
        rows = [*placed, *(queries + keys + head for head in kv)]
        norm = attention.query_key_norm
        return replace(
            attention,
            query_key_value=self._rows(attention.query_key_value, _wide(rows, dim)),
            linear_out=self._columns(attention.linear_out, range(own.start * dim, own.stop * dim)),
            heads=len(own),
            kv_heads=len(kv),
            query_key_norm=None if norm is None else norm[placed],
            group=self.group,
        )

    def _latent(self, attention: LatentProjection) -> LatentProjection:
        own, shape = self.part.heads(self.config), attention.shape
        return replace(
            attention,
            heads=len(own),
            query=self._rows(attention.query, _wide(own, shape.nope_dim + shape.rope_dim)),
            key_up=attention.key_up[own.start : own.stop].clone(),
            value_up=attention.value_up[own.start : own.stop].clone(),
            linear_out=self._columns(
                attention.linear_out, range(own.start * shape.value_dim, own.stop * shape.value_dim)
            ),
            key_value_down=self._whole(attention.key_value_down),
            query_down=None if attention.query_down is None else self._whole(attention.query_down),
        )

    def _mlp(self, mlp: Mlp) -> Mlp:
        if isinstance(mlp, GatedMlp):
            return self._gated(mlp)
        assert isinstance(mlp, MixtureOfExperts), "an MLP is gated, or a mixture"
        expert = self._whole_expert if self.part.whole_experts else self._mlp
        return replace(
            mlp,
            experts=tuple(map(expert, mlp.experts)),
            shared=None if mlp.shared is None else self._mlp(mlp.shared),
        )

    def _gated(self, mlp: GatedMlp) -> GatedMlp:
        down = _matrix(mlp.down)
        inner = down.shape[1]
        own = self.part.slice(inner, group=down.group if isinstance(down, QuantisedMatrix) else 1)
        return replace(
            mlp,
            gate_up=self._rows(mlp.gate_up, [*own, *(inner + number for number in own)]),
            down=self._columns(mlp.down, own),
        )

    def _whole_expert(self, expert: Mlp) -> Mlp:
        assert isinstance(expert, GatedMlp), "an expert is gated"
        return replace(expert, gate_up=self._whole(expert.gate_up), down=self._whole(expert.down))

    def _rows(self, linear: Linear, rows: Sequence[int]) -> Linear:
        """The matrix that computes only these of its results."""
        numbers, bias = torch.tensor(rows), _bias(linear)
        return self._stored(select_rows(_matrix(linear), numbers), None if bias is None else bias[numbers])

    def _columns(self, linear: Linear, columns: range) -> Linear:
        """The matrix for these of its inputs; its results of all parts add up."""
        try:
            own = select_columns(_matrix(linear), columns)
        except ValueError as error:
            raise UnsupportedCheckpoint(
                f"a matrix is not divided among processes: {error}", hint="leave out --tensor-parallel"
            ) from error
        return self._stored(own, _bias(linear) if self.part.rank == 0 else None)

    def _whole(self, linear: Linear) -> Linear:
        return self._stored(_matrix(linear), _bias(linear))

    def _stored(self, matrix: StoredMatrix, bias: Tensor | None) -> Linear:
        return self.stored.linear([matrix], bias)


def _wide(numbers: Sequence[int], width: int) -> list[int]:
    """The rows of heads with these numbers, `width` each."""
    return [number * width + offset for number in numbers for offset in range(width)]


def _as_read(linear: Linear) -> DenseLinear | QuantisedLinear:
    assert isinstance(linear, DenseLinear | QuantisedLinear), "matrices are cut as they are read"
    return linear


def _matrix(linear: Linear) -> StoredMatrix:
    held = _as_read(linear)
    return held.weight if isinstance(held, DenseLinear) else held.matrix


def _bias(linear: Linear) -> Tensor | None:
    return _as_read(linear).bias
