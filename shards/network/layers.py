"""The weights of a network and what a layer does with them, apart from attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; what reads the same input is one matrix.

    `query_key_value` [(heads + 2 * kv_heads) * head_dim, hidden]; `gate_up` [2 * intermediate, hidden];
    `query_key_norm` [heads + kv_heads, head_dim]: the norm weight of the queries and of the keys, once per head.
    """

    attention_norm: Tensor
    query_key_value: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    query_key_value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_key_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a network, in one dtype. With a tied head, `head` is `embedding` itself."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def normalize(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`hidden` with a root mean square of 1 over its last dimension, times `weight` (RMSNorm, arXiv 1910.07467)."""
    return functional.rms_norm(hidden, weight.shape[-1:], weight, eps)


def normalize_heads_in_place(heads: Tensor, weight: Tensor, eps: float) -> None:
    """Each head of `heads` [tokens, heads, head_dim] is normalized on its own; `weight` is [heads, head_dim]."""
    normalized = functional.rms_norm(heads, weight.shape[-1:], None, eps)
    torch.mul(normalized, weight, out=heads)


def gated_mlp(hidden: Tensor, layer: LayerWeights) -> Tensor:
    """down(silu(gate(hidden)) * up(hidden)), as `hidden` (SwiGLU, arXiv 2002.05202)."""
    gate, up = functional.linear(hidden, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
    return functional.linear(functional.silu(gate).mul_(up), layer.down, layer.down_bias)
