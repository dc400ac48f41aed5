"""The parts that layers are made of: matrices, norms, and the weights of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shards.compiled import LEAST_WIDTH
from shards.network.rope import Rotation


class Linear(Protocol):
    """A matrix [out, in] in any storage format, and optionally a bias."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """`hidden` [..., in] times the matrix, plus the bias: [..., out]."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A dense matrix [out, in], in the dtype of its input."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product, in the dtype of `hidden`."""
        return functional.linear(hidden, self.weight, self.bias)

    @classmethod
    def of(cls, parts: Iterable[Tensor], bias: Tensor | None = None) -> DenseLinear:
        """The layer of several matrices [out, in], stacked by rows."""
        matrices = list(parts)
        return cls(matrices[0] if len(matrices) == 1 else torch.cat(matrices), bias)


class Projection(Protocol):
    """What stands before and behind a layer's attention."""

    def project(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries [tokens, heads, head_dim], and what the cache keeps [tokens, kv_planes * kv_heads, head_dim].

        Queries and keys are rotated.
        """
        ...

    def output(self, mixed: Tensor) -> Tensor:
        """The part of the residual stream, [tokens, hidden], from the mix of values [tokens, heads, head_dim]."""
        ...


class Mlp(Protocol):
    """The part of a layer that computes each token by itself."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """From [tokens, hidden] to the same shape and dtype."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Norms [hidden] before attention and the MLP, and of their results before these join the residual stream; None where
    the family has none. `sinks` [heads]: the score of a position without value, which every token sees (gpt-oss).
    """

    attention: Projection
    mlp: Mlp
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    attention_after_norm: Tensor | None = None
    mlp_after_norm: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a network; activations have type `dtype`. A dense tied head shares the embedding."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear
    dtype: torch.dtype


def normalize(hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`hidden` with a root mean square of 1 over its last dimension, times `weight` (RMSNorm, arXiv 1910.07467).

    `hidden` itself without a weight. A float32 weight is multiplied in float32, and the product rounded once.
    """
    if weight is None:
        return hidden
    if is_compiled(hidden, weight):
        from shards.compiled.floats import bits
        from shards.compiled.rows import normalise

        out = torch.empty_like(hidden)
        normalise(bits(hidden), bits(weight), eps, bits(out))
        return out
    if weight.dtype == hidden.dtype:
        return functional.rms_norm(hidden, weight.shape[-1:], weight, eps)
    return functional.rms_norm(hidden.float(), weight.shape[-1:], weight, eps).to(hidden.dtype)


def normalize_heads_in_place(heads: Tensor, weight: Tensor, eps: float) -> None:
    """Normalize each head of `heads` [tokens, heads, head_dim] on its own; `weight` is [heads, head_dim].

    As in `normalize`, a float32 weight is multiplied in float32.
    """
    normalized = functional.rms_norm(heads.to(weight.dtype), weight.shape[-1:], None, eps)
    if weight.dtype == heads.dtype:
        torch.mul(normalized, weight, out=heads)
    else:
        heads.copy_(normalized.mul_(weight))


def is_compiled(rows: Tensor, weight: Tensor | None) -> bool:
    """Whether `shards.compiled.rows` takes these `rows` and a norm's `weight`: wide and of its types."""
    return (
        rows[0].numel() >= LEAST_WIDTH
        and rows.is_cpu
        and rows.is_contiguous()
        and rows.dtype in (torch.bfloat16, torch.float32)
        and (weight is None or weight.dtype == rows.dtype)
    )
