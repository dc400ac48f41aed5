"""Weights on a device: copied to it, or drawn on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from shards.gpu.mlp import AnyMatrix, GpuMixture, GpuMlp, Matrix, PackedMatrix
from shards.kernels.quantised import has_kernel
from shards.network.config import NetworkConfig
from shards.network.heads import HeadProjection
from shards.network.layers import DenseLinear, LayerWeights, Linear, Mlp, Weights
from shards.network.mlp import GatedMlp
from shards.network.moe import ExpertRouter, MixtureOfExperts
from shards.quant.linear import QuantisedLinear
from shards.quant.matrix import QuantisedMatrix, stacked

_SPREAD = 0.02
"""Standard deviation of the matrices in Hugging Face's initialisation."""


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One decoder layer; matrices that read the same input are joined.

    `query_norm` and `key_norm` are [head_dim], or as wide as all heads where these are normalised together. The other
    norms and the sinks are as in `LayerWeights`.
    """

    query_key_value: AnyMatrix
    output: AnyMatrix
    mlp: GpuMlp | GpuMixture
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    attention_after_norm: Tensor | None = None
    mlp_after_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    sinks: Tensor | None = None


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
                read += [held] if held is None or isinstance(held, Tensor) else held.tensors()
        return sum(tensor.nbytes for tensor in read if tensor is not None)


def head_norms(attention: HeadProjection) -> tuple[Tensor | None, Tensor | None]:
    """The norm weights of queries and of keys: of one head, as all have the same, or of all heads together."""
    norms = attention.query_key_norm
    if norms is None:
        return None, None
    queries, keys = norms[: attention.heads], norms[attention.heads :]
    return (queries.flatten(), keys.flatten()) if attention.is_wide else (queries[0], keys[0])


def _dense(linear: Linear, dtype: torch.dtype) -> DenseLinear:
    if isinstance(linear, QuantisedLinear):
        return DenseLinear(linear.matrix.dequantised(dtype), linear.bias)
    if not isinstance(linear, DenseLinear):
        raise TypeError(f"{type(linear).__name__} has no dense weight to move to a GPU")
    return linear


def _quantised_together(linears: Sequence[Linear]) -> QuantisedMatrix | None:
    """The matrices with all their rows in one; None unless all are quantised alike, with columns as inputs are."""
    matrices = [linear.matrix for linear in linears if isinstance(linear, QuantisedLinear)]
    if len(matrices) < len(linears) or matrices[0].order is not None:
        return None
    together = stacked(matrices, torch.float32)
    return together if isinstance(together, QuantisedMatrix) else None


def moved(weights: Weights, config: NetworkConfig, *, device: torch.device, dtype: torch.dtype) -> GpuWeights:
    """`weights` on `device` in `dtype`, layer by layer; a tied head stays tied.

    Raises ValueError if they do not fit.
    """

    def move(tensor: Tensor) -> Tensor:
        try:
            return tensor.to(device, dtype).contiguous()
        except torch.OutOfMemoryError as error:
            raise ValueError(f"the weights do not fit into the memory of {device}: {error}") from error

    def norm(weight: Tensor | None) -> Tensor | None:
        if weight is None:
            return None
        # a family that keeps its norms in float32 keeps them here too
        is_kept = weight.dtype == torch.float32 != weights.dtype
        return weight.to(device).contiguous() if is_kept else move(weight)

    def matrix(linear: Linear) -> AnyMatrix:
        bias = getattr(linear, "bias", None)
        bias = None if bias is None else move(bias)
        if isinstance(linear, QuantisedLinear) and has_kernel(linear.matrix, device):
            return PackedMatrix(move_packed(linear.matrix), bias)
        return Matrix(move(_dense(linear, dtype).weight), bias)

    def move_packed(packed: QuantisedMatrix) -> QuantisedMatrix:
        try:
            return packed.moved(device)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"the weights do not fit into the memory of {device}: {error}") from error

    def gated(mlp: Mlp) -> GpuMlp:
        assert isinstance(mlp, GatedMlp), "an expert or an MLP is gated"
        return GpuMlp(matrix(mlp.gate_up), matrix(mlp.down), config.activation)

    def joined(linears: Sequence[Linear]) -> tuple[Tensor | QuantisedMatrix, Tensor | None]:
        biases = [move(linear.bias) for linear in linears if getattr(linear, "bias", None) is not None]  # type: ignore[attr-defined]
        bias = torch.stack(biases) if biases else None
        packed = _quantised_together(linears)
        if packed is not None and has_kernel(packed, device):
            return move_packed(packed), bias
        # one by one, so that the device holds no second copy
        first = _dense(linears[0], dtype).weight
        weights = torch.empty((len(linears), *first.shape), dtype=dtype, device=device)
        for target, linear in zip(weights, linears, strict=True):
            target.copy_(_dense(linear, dtype).weight)
        return weights, bias

    def mixture(mixed: MixtureOfExperts) -> GpuMixture:
        experts = [expert for expert in mixed.experts if isinstance(expert, GatedMlp)]
        gate_up, gate_up_bias = joined([expert.gate_up for expert in experts])
        down, down_bias = joined([expert.down for expert in experts])
        router = mixed.router
        placed = (None if held is None else held.to(device) for held in (router.bias, router.correction))
        return GpuMixture(
            ExpertRouter(router.experts, router.weight.to(device), *placed),
            range(mixed.first, mixed.first + len(experts)),
            gate_up,
            down,
            gate_up_bias,
            down_bias,
            config.activation,
            None if mixed.shared is None else gated(mixed.shared),
        )

    def move_layer(layer: LayerWeights) -> GpuLayer:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, HeadProjection), "latent attention is not on the GPU"
        query_norm, key_norm = head_norms(attention)
        return GpuLayer(
            query_key_value=matrix(attention.query_key_value),
            output=matrix(attention.linear_out),
            mlp=mixture(mlp) if isinstance(mlp, MixtureOfExperts) else gated(mlp),
            attention_norm=norm(layer.attention_norm),
            mlp_norm=norm(layer.mlp_norm),
            attention_after_norm=norm(layer.attention_after_norm),
            mlp_after_norm=norm(layer.mlp_after_norm),
            query_norm=norm(query_norm),
            key_norm=norm(key_norm),
            sinks=norm(layer.sinks),
        )

    embedding, last_norm = move(weights.embedding), norm(weights.norm)
    assert last_norm is not None, "every network has a last norm"
    return GpuWeights(
        embedding=embedding,
        layers=tuple(move_layer(layer) for layer in weights.layers),
        norm=last_norm,
        head=_moved_head(weights, embedding, dtype, move),
    )


def _moved_head(weights: Weights, embedding: Tensor, dtype: torch.dtype, move: Callable[[Tensor], Tensor]) -> Tensor:
    """The head; of a tied one, the rows of the moved `embedding` that it has."""
    head, source = _dense(weights.head, dtype).weight, weights.embedding
    if head.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        return move(head)
    start = (head.data_ptr() - source.data_ptr()) // (source.stride(0) * source.element_size())
    return embedding[start : start + len(head)]


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
            mlp=GpuMlp(
                matrix(2 * inner, hidden, config.mlp_bias), matrix(hidden, inner, config.mlp_bias), config.activation
            ),
            query_norm=ones(config.head_dim) if config.query_key_norm else None,
            key_norm=ones(config.head_dim) if config.query_key_norm else None,
        )

    embedding = draw(config.vocab_size, hidden)
    layers = tuple(layer() for _ in range(config.layers))
    head = embedding if config.tied_head else draw(config.vocab_size, hidden)
    return GpuWeights(embedding, layers, ones(hidden), head)
