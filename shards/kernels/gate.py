"""The activation of gated MLPs, over the fused projection's output."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shards.kernels.launch import Gpu, Launch, gpu_of, require
from shards.network.mlp import ACTIVATIONS, SWIGLU_ALPHA, SWIGLU_LIMIT


def gate_reference(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """`activation` of the first half of each row as the gate of its second half. The reference for `gate`.

    Shapes: gate_up [tokens, 2 * inner]; returned [tokens, inner] of its type. `activation` is one of `ACTIVATIONS`.
    Computed in float32, rounded once.
    """
    opening, up = gate_up.float().chunk(2, dim=-1)
    return ACTIVATIONS[activation](opening, up.clone()).to(gate_up.dtype)


@triton.jit
def _gate(
    gate_up,
    out,
    gate_up_token,
    inner,
    TILE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):
    # int64 before multiplying: 100,000 tokens of 2 * 14336 pass 2**31
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < inner
    opening = tl.load(gate_up + token * gate_up_token + at, mask=mask).to(tl.float32)
    up = tl.load(gate_up + token * gate_up_token + inner + at, mask=mask).to(tl.float32)
    if ACTIVATION == "gelu_tanh":
        # twice sqrt(2 / pi), since tanh(x) is 2 * sigmoid(2 * x) - 1
        slope = 1.5957691216057308 * (opening + 0.044715 * opening * opening * opening)
        # below this the gate is shut in float32, and the exponential of more would overflow
        value = opening * tl.sigmoid(tl.maximum(slope, -80.0)) * up
    elif ACTIVATION == "clamped_swiglu":
        opening = tl.minimum(opening, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        value = opening * tl.sigmoid(ALPHA * opening) * (up + 1.0)
    else:
        value = opening * tl.sigmoid(opening) * up
    tl.store(out + token * inner + at, value.to(out.dtype.element_ty), mask=mask)


def gate(gate_up: torch.Tensor, activation: str = "silu", *, gpu: Gpu | None = None) -> torch.Tensor:
    """The result of `gate_reference`. Rows need not be adjacent. Raises ValueError for other shapes."""
    gpu = gpu or gpu_of(gate_up.device)
    halved = gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    require(halved, f"gate_up is {list(gate_up.shape)}, not [tokens, 2 * inner]")
    require(gate_up.stride(1) == 1, "a row of gate_up is not in one piece")
    require(activation in ACTIVATIONS, f"activation is {activation}, not {', '.join(ACTIVATIONS)}")
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    # 1024 elements on 4 warps: 16 bytes a thread and operand, the widest load
    tile = min(1024, triton.next_power_of_2(inner))
    grid = (tokens, triton.cdiv(inner, tile))
    constants: dict[str, int | float | str] = {"TILE": tile, "ACTIVATION": activation}
    constants |= {"LIMIT": SWIGLU_LIMIT, "ALPHA": SWIGLU_ALPHA}
    gpu.start(Launch(_gate, grid, (gate_up, out, gate_up.stride(0), inner), constants))
    return out
