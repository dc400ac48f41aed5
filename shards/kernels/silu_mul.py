"""SiLU(gate) * up, over the fused projection's output."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shards.kernels.launch import Gpu, Launch, gpu_of, require


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row times its second half. The reference for `silu_mul`.

    Shapes: gate_up [tokens, 2 * inner]; returned [tokens, inner] of its type. Computed in float32, rounded once.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def _silu_mul(gate_up, out, gate_up_token, inner, TILE: tl.constexpr):
    # int64 before multiplying: 100,000 tokens of 2 * 14336 pass 2**31
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < inner
    gate = tl.load(gate_up + token * gate_up_token + at, mask=mask).to(tl.float32)
    up = tl.load(gate_up + token * gate_up_token + inner + at, mask=mask).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + token * inner + at, value.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, *, gpu: Gpu | None = None) -> torch.Tensor:
    """The result of `silu_mul_reference`. Rows need not be adjacent. Raises ValueError for other shapes."""
    gpu = gpu or gpu_of(gate_up.device)
    halved = gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    require(halved, f"gate_up is {list(gate_up.shape)}, not [tokens, 2 * inner]")
    require(gate_up.stride(1) == 1, "a row of gate_up is not in one piece")
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inner)
    # 1024 elements on 4 warps: 16 bytes a thread and operand, the widest load
    tile = min(1024, triton.next_power_of_2(inner))
    grid = (tokens, triton.cdiv(inner, tile))
    gpu.start(Launch(_silu_mul, grid, (gate_up, out, gate_up.stride(0), inner), {"TILE": tile}))
    return out
