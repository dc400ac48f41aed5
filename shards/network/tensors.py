"""Builds the weights of a network of any family from the tensors of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shards.network.config import NetworkConfig
from shards.network.family import Family
from shards.network.heads import HeadProjection
from shards.network.layers import LayerWeights, Linear, Mlp, Weights
from shards.network.mlp import ACTIVATIONS, GatedMlp
from shards.network.moe import ExpertRouter, MixtureOfExperts
from shards.quant.matrix import StoredMatrix, select_rows, stacked

MakeLinear = Callable[[Iterable[StoredMatrix], Tensor | None], Linear]
"""Makes one matrix from parts, stacked by rows, and a bias."""


class TensorSource(Protocol):
    """Tensors, by the names that transformers uses. `dtype` is the type of the activations."""

    dtype: torch.dtype

    def has(self, name: str) -> bool:
        """Whether there is a tensor called `name`."""
        ...

    def take_bytes(self, name: str, *shape: int, own: range | None = None) -> Tensor:
        """The uint8 tensor called `name`, of this shape; only its parts `own`, if given."""
        ...

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, own: range | None = None) -> Tensor:
        """The tensor called `name`, of this shape, as `dtype` or else in the type of the activations; only its parts
        `own` along the first dimension, if given.

        A matrix that is stored in fewer bits is dequantised.
        """
        ...

    def leave(self, prefix: str) -> None:
        """Leave the tensors with names that begin with `prefix` to other processes."""
        ...

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        """The matrix `name`.weight [outputs, inputs], in fewer bits if it is stored so."""
        ...


class Form(NamedTuple):
    """The storage of weights: `linear` makes a matrix from its parts. Activations are float32 if `is_wide`, and else of
    the source's type.
    """

    linear: MakeLinear
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Builder:
    """Takes each tensor that `config` needs from `source`, by the names of `family`, and stores it as `form`."""

    config: NetworkConfig
    family: Family
    source: TensorSource
    form: Form

    def weights(self) -> Weights:
        """All weights."""
        config = self.config
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = self.source.take("model.embed_tokens.weight", *vocabulary)
        return Weights(
            embedding=embedding,
            layers=tuple(self.layer(index) for index in range(config.layers)),
            norm=self.norm("model.norm", config.hidden_size),
            head=self.form.linear(
                [embedding if config.tied_head else self.source.matrix("lm_head", *vocabulary)], None
            ),
            dtype=torch.float32 if self.form.is_wide else self.source.dtype,
        )

    def layer(self, index: int) -> LayerWeights:
        """One layer: its norms by name, its attention and MLP as the family makes them."""
        config, family, names = self.config, self.family, self.family.names

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self.norm(self.name(index, name), config.hidden_size)

        has_experts = config.experts is not None and index in config.experts.layers
        sinks = self.source.take(self.name(index, "self_attn.sinks"), config.heads) if config.has_sinks else None
        return LayerWeights(
            attention_norm=norm(names.attention_norm),
            attention=(family.attention or Builder.heads)(self, index),
            attention_after_norm=norm(names.attention_after_norm),
            mlp_norm=norm(names.mlp_norm),
            mlp=(family.mlp or (Builder.mixture if has_experts else Builder.dense))(self, index),
            mlp_after_norm=norm(names.mlp_after_norm),
            sinks=sinks,
        )

    def heads(self, index: int) -> HeadProjection:
        """Attention with separate heads."""
        config, names = self.config, self.family.names
        query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
        widths = (query, key_value, key_value)
        parts = [self.name(index, name) for name in names.query_key_value]
        joined = _joined_widths(widths, len(parts))
        take = self.source.take
        matrices: Iterable[StoredMatrix] = (
            self.source.matrix(name, width, config.hidden_size) for name, width in zip(parts, joined, strict=True)
        )
        biases = [take(f"{name}.bias", width) for name, width in zip(parts, joined, strict=True) if config.qkv_bias]
        bias = torch.cat(biases) if biases else None
        order = config.rope.order(config.head_dim)
        if order is not None:
            rows = self._ordered(torch.arange(query + 2 * key_value), order)
            matrices = [select_rows(stacked(matrices, self.source.dtype), rows)]
            bias = None if bias is None else bias[rows]
        return HeadProjection(
            query_key_value=self.form.linear(matrices, bias),
            linear_out=self.linear(self.name(index, names.output), query, config.hidden_size, config.output_bias),
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            query_key_norm=self._query_key_norm(index, order) if config.query_key_norm else None,
            is_wide=config.wide_norm,
        )

    def dense(self, index: int) -> GatedMlp:
        """One MLP for all tokens."""
        names = self.family.names
        gate_up = tuple(self.name(index, name) for name in names.gate_up)
        down, inner = self.name(index, names.down), self.config.intermediate_size
        return self.gated(gate_up, down, inner, has_bias=self.config.mlp_bias)

    def mixture(self, index: int) -> MixtureOfExperts:
        """A mixture of experts, each with tensors of its own."""
        experts, names = self.config.experts, self.family.names
        assert experts is not None, "a network without experts has no mixture"

        def expert(prefix: str, inner: int) -> GatedMlp:
            gate_up = tuple(prefix + name for name in names.expert_gate_up)
            return self.gated(gate_up, prefix + names.expert_down, inner)

        def shared() -> Mlp | None:
            prefix = self.name(index, names.shared)
            inner = experts.shared_inner
            return (
                self.gated((prefix + "gate_proj", prefix + "up_proj"), prefix + "down_proj", inner) if inner else None
            )

        each, own = self.name(index, names.expert), self.own_experts(experts.count)
        for number in range(experts.count):
            if number not in own:
                self.source.leave(f"{each}{number}.")
        return MixtureOfExperts(
            router=self.router(index),
            experts=tuple(expert(f"{each}{number}.", experts.inner) for number in own),
            shared=shared(),
            first=own.start,
        )

    def own_experts(self, count: int) -> range:
        """The numbers of the experts that this process computes: all of `count`."""
        return range(count)

    def router(self, index: int, *, has_bias: bool = False) -> ExpertRouter:
        """The router of a mixture, in float32."""
        experts, names, exact = self.config.experts, self.family.names, torch.float32
        assert experts is not None, "a network without experts has no router"
        name, take = self.name(index, names.router), self.source.take
        return ExpertRouter(
            experts,
            take(f"{name}.weight", experts.count, self.config.hidden_size, dtype=exact),
            take(f"{name}.bias", experts.count, dtype=exact) if has_bias else None,
            take(self.name(index, names.correction), experts.count, dtype=exact) if experts.has_correction else None,
        )

    def gated(self, gate_up: Sequence[str], down: str, inner: int, *, has_bias: bool = False) -> GatedMlp:
        """A gated MLP of the matrices with these names."""
        hidden, take, wide = self.config.hidden_size, self.source.take, 2 * inner // len(gate_up)
        biases = [take(f"{name}.bias", wide) for name in gate_up if has_bias]
        return GatedMlp(
            gate_up=self.form.linear(
                (self.source.matrix(name, wide, hidden) for name in gate_up), torch.cat(biases) if biases else None
            ),
            down=self.linear(down, inner, hidden, has_bias),
            activation=ACTIVATIONS[self.config.activation],
        )

    def linear(self, name: str, inputs: int, outputs: int, has_bias: bool = False) -> Linear:
        """The matrix called `name`."""
        bias = self.source.take(f"{name}.bias", outputs) if has_bias else None
        return self.form.linear([self.source.matrix(name, outputs, inputs)], bias)

    def norm(self, name: str, width: int) -> Tensor:
        """The norm called `name`."""
        weight = self.source.take(f"{name}.weight", width)
        # rounded to bfloat16, the sum with an offset would raise the error of a network by a quarter
        return weight.float() + self.family.norm_offset if self.family.norm_offset else self.activated(weight)

    def activated(self, tensor: Tensor) -> Tensor:
        """`tensor` in the type of the activations."""
        return tensor.float() if self.form.is_wide else tensor

    def name(self, index: int, name: str) -> str:
        """The full name of a tensor of layer `index`."""
        return f"model.layers.{index}.{name}"

    def _query_key_norm(self, index: int, order: list[int] | None) -> Tensor:
        config, names = self.config, self.family.names
        sides = []
        for name, heads in ((names.query_norm, config.heads), (names.key_norm, config.kv_heads)):
            width = heads * config.head_dim if config.wide_norm else config.head_dim
            weight = self.norm(self.name(index, name), width).view(-1, config.head_dim).expand(heads, -1)
            sides.append(weight if order is None else weight[:, order])
        return torch.cat(sides)

    def _ordered(self, rows: Tensor, order: list[int]) -> Tensor:
        """`rows` of queries, keys and values with the numbers of each query and key head in `order`."""
        config = self.config
        turned = (config.heads + config.kv_heads) * config.head_dim
        heads = rows[:turned].view(-1, config.head_dim, *rows.shape[1:])
        return torch.cat((heads[:, order].reshape(rows[:turned].shape), rows[turned:]))


def _joined_widths(widths: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The rows of each of `parts` matrices that hold rows of these `widths`: all of them, or one each."""
    return widths if parts == len(widths) else (sum(widths),)
