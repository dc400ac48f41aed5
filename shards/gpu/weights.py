"""Weights on a device: copied to it, or drawn on it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from shards.network.config import NetworkConfig
from shards.network.heads import HeadProjection
from shards.network.layers import DenseLinear, LayerWeights, Linear, Weights
from shards.network.mlp import GatedMlp

_SPREAD = 0.02
"""Standard deviation of the matrices in Hugging Face's initialisation."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer: weight [out, in], and a bias [out] or none."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One decoder layer; matrices that read the same input are joined. The norms of a head, [head_dim], are Qwen3's."""

    attention_norm: Tensor
    query_key_value: Matrix
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """All weights of a network, on one device and in one type. With a tied head, `head` is `embedding` itself."""

    embedding: Tensor
    layers: tuple[GpuLayer, ...]
    norm: Tensor
    head: Tensor

    @property
    def bytes_per_step(self) -> int:
        """Bytes of the weights that a step reads; of an embedding that is not also the head, only some rows."""
        read: list[Tensor | None] = [self.norm, self.head]
        for layer in self.layers:
            for field in fields(layer):
                held = getattr(layer, field.name)
                read += [held.weight, held.bias] if isinstance(held, Matrix) else [held]
        return sum(tensor.nbytes for tensor in read if tensor is not None)


def _dense(linear: Linear) -> DenseLinear:
    if not isinstance(linear, DenseLinear):
        raise TypeError(f"{type(linear).__name__} has no dense weight to move to a GPU")
    return linear


def moved(weights: Weights, config: NetworkConfig, *, device: torch.device, dtype: torch.dtype) -> GpuWeights:
    """`weights` on `device` in `dtype`, layer by layer; a tied head stays tied.

    Raises ValueError if they do not fit.
    """

    def move(tensor: Tensor) -> Tensor:
        try:
            return tensor.to(device, dtype).contiguous()
        except torch.OutOfMemoryError as error:
            raise ValueError(f"the weights do not fit into the memory of {device}: {error}") from error

    def matrix(linear: Linear) -> Matrix:
        dense = _dense(linear)
        return Matrix(move(dense.weight), None if dense.bias is None else move(dense.bias))

    def move_layer(layer: LayerWeights) -> GpuLayer:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, HeadProjection), "latent attention is not on the GPU"
        assert isinstance(mlp, GatedMlp), "mixtures are not on the GPU"
        assert layer.attention_norm is not None, "a norm is missing"
        assert layer.mlp_norm is not None, "a norm is missing"
        norms = attention.query_key_norm
        return GpuLayer(
            attention_norm=move(layer.attention_norm),
            query_key_value=matrix(attention.query_key_value),
            output=matrix(attention.linear_out),
            mlp_norm=move(layer.mlp_norm),
            gate_up=matrix(mlp.gate_up),
            down=matrix(mlp.down),
            # the CPU's weights have them once per head
            query_norm=None if norms is None else move(norms[0]),
            key_norm=None if norms is None else move(norms[config.heads]),
        )

    embedding = move(weights.embedding)
    return GpuWeights(
        embedding=embedding,
        layers=tuple(move_layer(layer) for layer in weights.layers),
        norm=move(weights.norm),
        head=embedding if config.tied_head else move(_dense(weights.head).weight),
    )


def random_on(device: torch.device, config: NetworkConfig, *, dtype: torch.dtype, seed: int = 0) -> GpuWeights:
    """Weights drawn on `device` itself: nothing to download, and no copy of them on the host."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden, inner, query = config.hidden_size, config.intermediate_size, config.heads * config.head_dim

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, _SPREAD, generator=generator)

    def ones(width: int) -> Tensor:
        return torch.ones(width, dtype=dtype, device=device)

    def matrix(outputs: int, inputs: int, has_bias: bool) -> Matrix:
        return Matrix(draw(outputs, inputs), draw(outputs) if has_bias else None)

    def layer() -> GpuLayer:
        return GpuLayer(
            attention_norm=ones(hidden),
            query_key_value=matrix(query + 2 * config.kv_heads * config.head_dim, hidden, config.qkv_bias),
            output=matrix(hidden, query, config.output_bias),
            mlp_norm=ones(hidden),
            gate_up=matrix(2 * inner, hidden, config.mlp_bias),
            down=matrix(hidden, inner, config.mlp_bias),
            query_norm=ones(config.head_dim) if config.query_key_norm else None,
            key_norm=ones(config.head_dim) if config.query_key_norm else None,
        )

    embedding = draw(config.vocab_size, hidden)
    layers = tuple(layer() for _ in range(config.layers))
    head = embedding if config.tied_head else draw(config.vocab_size, hidden)
    return GpuWeights(embedding, layers, ones(hidden), head)
