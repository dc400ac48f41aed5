"""The weights of a network and the computations of a layer, except attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


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


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices that read the same input are joined.

    `query_key_value` goes from hidden to (heads + 2 * kv_heads) * head_dim, `gate_up` to 2 * intermediate;
    `query_key_norm` [heads + kv_heads, head_dim]: the norm weights of the queries and of the keys, once per head.
    """

    attention_norm: Tensor
    query_key_value: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    query_key_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a network. Activations have the dtype of the norms; a dense tied head shares the embedding."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear


def normalize(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`hidden` with a root mean square of 1 over its last dimension, times `weight` (RMSNorm, arXiv 1910.07467)."""
    return functional.rms_norm(hidden, weight.shape[-1:], weight, eps)


def normalize_heads_in_place(heads: Tensor, weight: Tensor, eps: float) -> None:
    """Normalize each head of `heads` [tokens, heads, head_dim] on its own; `weight` is [heads, head_dim]."""
    normalized = functional.rms_norm(heads, weight.shape[-1:], None, eps)
    torch.mul(normalized, weight, out=heads)


def gated_mlp(hidden: Tensor, layer: LayerWeights) -> Tensor:
    """down(silu(gate(hidden)) * up(hidden)), as `hidden` (SwiGLU, arXiv 2002.05202)."""
    gate, up = layer.gate_up(hidden).chunk(2, -1)
    return layer.down(functional.silu(gate).mul_(up))
