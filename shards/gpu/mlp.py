"""The part of a layer on the GPU that computes each token by itself: an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shards.kernels.experts import SortedRows, multiply_by_expert
from shards.kernels.gate import gate
from shards.kernels.quantised import multiply_quantised
from shards.network.moe import ExpertRouter
from shards.quant.matrix import QuantisedMatrix


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer: weight [out, in], and a bias [out] or none."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product, [..., out]."""
        return functional.linear(hidden, self.weight, self.bias)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that a product reads."""
        yield self.weight
        if self.bias is not None:
            yield self.bias


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A linear layer in fewer bits: `matrix` [out, in], and a bias [out] or none."""

    matrix: QuantisedMatrix
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product, [tokens, out]."""
        order = self.matrix.order
        rows = hidden if order is None else hidden.index_select(1, order)
        return multiply_quantised(rows, self.matrix, self.bias)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that a product reads."""
        yield from self.matrix.tensors()
        if self.bias is not None:
            yield self.bias


class AnyMatrix(Protocol):
    """A linear layer in any form."""

    def __call__(self, hidden: Tensor, /) -> Tensor:
        """The product of [tokens, in], [tokens, out]."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that a product reads."""
        ...


@dataclass(frozen=True, slots=True)
class GpuMlp:
    """down(activation(gate_up(hidden))): see `shards.kernels.gate`."""

    gate_up: AnyMatrix
    down: AnyMatrix
    activation: str = "silu"

    def __call__(self, hidden: Tensor) -> Tensor:
        """From [tokens, hidden] to the same shape."""
        return self.down(gate(self.gate_up(hidden), self.activation))

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that it reads."""
        yield from self.gate_up.tensors()
        yield from self.down.tensors()


@dataclass(frozen=True, slots=True)
class GpuMixture:
    """A mixture of experts, of which this has those of the numbers `own`; what others would add, other processes add.

    All are in one tensor: gate_up [experts, 2 * inner, hidden] and down [experts, hidden, inner], or quantised with the
    rows of all experts, and biases [experts, out] or none. `shared` computes all tokens.

    Nothing is copied to the host, so a graph can contain it.
    """

    router: ExpertRouter
    own: range
    gate_up: Tensor | QuantisedMatrix
    down: Tensor | QuantisedMatrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "silu"
    shared: GpuMlp | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """From [tokens, hidden] to the same shape. The sum over a token's experts is float32, in their order."""
        weights, chosen = self.router(hidden)
        experts, own = self.router.experts.count, self.own
        rows, count = SortedRows.of(chosen, experts), chosen.numel()
        bounds = rows.bounds if len(own) == experts else rows.bounds[own.start : own.stop + 1]
        opened = multiply_by_expert(
            hidden,
            self.gate_up,
            experts=len(own),
            pairs=count,
            bounds=bounds,
            sources=rows.tokens,
            bias=self.gate_up_bias,
        )
        each = multiply_by_expert(
            gate(opened, self.activation),
            self.down,
            experts=len(own),
            pairs=count,
            bounds=bounds,
            targets=rows.places,
            bias=self.down_bias,
            shares=weights.flatten(),
        )
        each = each.view(*chosen.shape, -1)
        if len(own) != experts:
            is_elsewhere = (chosen < own.start) | (chosen >= own.stop)
            each = each.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        mixed = each.sum(1, dtype=torch.float32)
        return (mixed if self.shared is None else mixed + self.shared(hidden)).to(hidden.dtype)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that a step can read: few tokens do not read all experts."""
        yield self.router.weight
        for matrices in (self.gate_up, self.down):
            yield from matrices.tensors() if isinstance(matrices, QuantisedMatrix) else (matrices,)
        yield from (bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        if self.shared is not None:
            yield from self.shared.tensors()
