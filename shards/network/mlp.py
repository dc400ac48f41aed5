"""Gated MLPs, and the activations that gate them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shards.network.layers import Linear

Activation = Callable[[Tensor, Tensor], Tensor]
"""The inner numbers from `gate` and `up`, which it may overwrite."""

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Constants of `clamped_swiglu`."""


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate).mul_(up)


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh").mul_(up)


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return torch.sigmoid(gate * SWIGLU_ALPHA).mul_(gate).mul_(up + 1)


ACTIVATIONS: dict[str, Activation] = {"silu": _silu, "gelu_tanh": _gelu_tanh, "clamped_swiglu": _clamped_swiglu}
"""`silu` and `gelu_tanh` of the gate times up (GLU variants, arXiv 2002.05202); `clamped_swiglu` is gpt-oss's."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(hidden), up(hidden))). `gate_up` goes from hidden to 2 * inner: first the gate, then up."""

    gate_up: Linear
    down: Linear
    activation: Activation = _silu

    def __call__(self, hidden: Tensor) -> Tensor:
        """From [tokens, hidden] to the same shape."""
        return self.down(self.activation(*self.gate_up(hidden).chunk(2, -1)))
