"""Builds the weights of one part of a network, layer by layer: the whole network is never in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

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
from shards.quant.matrix import StoredMatrix


@dataclass(frozen=True, slots=True)
class PartBuilder(Builder):
    """A `Builder` of the part that `group` gives this process. Matrices are cut as `form` reads them, and then stored
    as `stored`: a product of several parts is a sum, and a bias is in the first of them alone.
    """

    group: Group
    stored: Form

    @classmethod
    def of(cls, builder: Builder, group: Group) -> PartBuilder:
        """The builder of a part of the weights that `builder` makes."""
        dense = Form(_whole_numbers, is_wide=builder.form.is_wide)
        return cls(builder.config, builder.family, builder.source, dense, group, builder.form)

    @property
    def part(self) -> Part:
        """The part of this process."""
        return Part(self.group.rank, self.group.size)

    def weights(self) -> Weights:
        """The weights of this part. The embedding is whole: a step reads only the rows of its tokens."""
        weights = Builder.weights(self)
        own = self.part.vocabulary(self.config.vocab_size)
        each = len(Part(0, self.group.size).vocabulary(self.config.vocab_size))
        head = _dense(weights.head).weight[own.start : own.stop]
        if len(own) < each:
            head = torch.cat((head, head.new_zeros(each - len(own), head.shape[1])))
        # a tied head is a view of the embedding, and any other is copied, so that the rest can be freed
        head = head if self.config.tied_head else head.clone()
        return replace(weights, head=self.stored.linear([head], None))

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
        own = self.part.slice(len(mlp.experts))
        experts = [mlp.experts[number] for number in own]
        return replace(
            mlp,
            experts=tuple(self._whole_mlp(expert) for expert in experts),
            first=own.start,
            shared=None if mlp.shared is None else self._mlp(mlp.shared),
        )

    def _gated(self, mlp: GatedMlp) -> GatedMlp:
        inner = _dense(mlp.down).weight.shape[1]
        own = self.part.slice(inner)
        return replace(
            mlp,
            gate_up=self._rows(mlp.gate_up, [*own, *(inner + number for number in own)]),
            down=self._columns(mlp.down, own),
        )

    def _whole_mlp(self, expert: Mlp) -> Mlp:
        assert isinstance(expert, GatedMlp), "an expert is gated"
        return replace(expert, gate_up=self._whole(expert.gate_up), down=self._whole(expert.down))

    def _rows(self, linear: Linear, rows: Sequence[int]) -> Linear:
        """The matrix that computes only these of its results."""
        dense = _dense(linear)
        return self._stored(dense.weight[rows], None if dense.bias is None else dense.bias[rows])

    def _columns(self, linear: Linear, columns: range) -> Linear:
        """The matrix for these of its inputs; its results of all parts add up."""
        dense = _dense(linear)
        bias = dense.bias if self.group.rank == 0 else None
        return self._stored(dense.weight[:, columns.start : columns.stop].contiguous(), bias)

    def _whole(self, linear: Linear) -> Linear:
        dense = _dense(linear)
        # a part of a larger tensor keeps all of it in memory
        is_part = dense.weight.untyped_storage().nbytes() > dense.weight.nbytes
        return self._stored(dense.weight.clone() if is_part else dense.weight, dense.bias)

    def _stored(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.stored.linear([weight], bias)


def _whole_numbers(parts: Iterable[StoredMatrix], bias: Tensor | None) -> DenseLinear:
    dense = [part for part in parts if isinstance(part, Tensor) or _refuse(type(part))]
    return DenseLinear.of((part for part in dense if isinstance(part, Tensor)), bias)


def _refuse(kind: type) -> NoReturn:
    raise UnsupportedCheckpoint(
        f"a matrix stored as {kind.__name__} is not divided among processes",
        hint="leave out --tensor-parallel, or use a checkpoint in float32, float16 or bfloat16",
    )


def _wide(numbers: Sequence[int], width: int) -> list[int]:
    """The rows of heads with these numbers, `width` each."""
    return [number * width + offset for number in numbers for offset in range(width)]


def _dense(linear: Linear) -> DenseLinear:
    if not isinstance(linear, DenseLinear):
        _refuse(type(linear))
    return linear
