"""The part of a layer on the GPU that computes each token by itself: an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shards.kernels.experts import SortedRows, multiply_by_expert
from shards.kernels.gate import gate
from shards.network.moe import ExpertRouter


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
class GpuMlp:
    """down(activation(gate_up(hidden))): see `shards.kernels.gate`."""

    gate_up: Matrix
    down: Matrix
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
    """A mixture of experts; all of them in one tensor: gate_up [experts, 2 * inner, hidden] and down [experts, hidden,
    inner], with biases [experts, out] or none. `shared` computes all tokens.

    Nothing is copied to the host, so a graph can contain it.
    """

    router: ExpertRouter
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "silu"
    shared: GpuMlp | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """From [tokens, hidden] to the same shape. The sum over a token's experts is float32, in their order."""
        weights, chosen = self.router(hidden)
        rows, count = SortedRows.of(chosen, len(self.gate_up)), chosen.numel()
        opened = multiply_by_expert(
            hidden, self.gate_up, pairs=count, bounds=rows.bounds, sources=rows.tokens, bias=self.gate_up_bias
        )
        each = multiply_by_expert(
            gate(opened, self.activation),
            self.down,
            pairs=count,
            bounds=rows.bounds,
            targets=rows.places,
            bias=self.down_bias,
            shares=weights.flatten(),
        )
        mixed = each.view(*chosen.shape, -1).sum(1, dtype=torch.float32)
        return (mixed if self.shared is None else mixed + self.shared(hidden)).to(hidden.dtype)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that a step can read: few tokens do not read all experts."""
        held = (self.router.weight, self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        yield from (tensor for tensor in held if tensor is not None)
        if self.shared is not None:
            yield from self.shared.tensors()
