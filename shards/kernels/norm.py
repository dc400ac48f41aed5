"""RMSNorm, with the addition of the residual stream."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shards.kernels.launch import Gpu, Launch, gpu_of, require, require_shape


def rms_norm_reference(
    hidden: torch.Tensor, weight: torch.Tensor, *, epsilon: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised rows, and the new residual stream. The reference for `rms_norm`.

    Shapes: hidden, residual and both results [tokens, width] of one type; weight [width]. The stream is hidden +
    residual, rounded to that type; the norm is of the rounded sum, in float32 and rounded once.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    stream = hidden if residual is None else (hidden.float() + residual.float()).to(hidden.dtype)
    wide = stream.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (normal * weight.float()).to(hidden.dtype), stream


@triton.jit
def _rms_norm(hidden, weight, residual, out, stream, hidden_token, width, epsilon, TILE: tl.constexpr):
    # int64 before multiplying: 300,000 tokens of 8192 pass 2**31
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    mask = at < width
    wide = tl.load(hidden + token * hidden_token + at, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + token * width + at, mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(stream.dtype.element_ty)
        tl.store(stream + token * width + at, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
    normal = wide * scale * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, normal.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    epsilon: float,
    residual: torch.Tensor | None = None,
    gpu: Gpu | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `rms_norm_reference`. Raises ValueError for other shapes.

    Rows of hidden need not be adjacent; residual is contiguous. Without a residual the stream is `hidden` itself.
    """
    gpu = gpu or gpu_of(hidden.device)
    require(hidden.dim() == 2 and hidden.stride(1) == 1, f"hidden is {list(hidden.shape)}, not rows [tokens, width]")
    tokens, width = hidden.shape
    require_shape("weight", weight, (width,))
    out, stream = hidden.new_empty(tokens, width), hidden
    if residual is not None:
        require_shape("residual", residual, (tokens, width))
        require(residual.is_contiguous() and residual.dtype == hidden.dtype, "residual is not laid out like hidden")
        stream = torch.empty_like(out)
    # a row is one tile in registers: 16 elements of it per thread, between 4 warps and 16
    tile = triton.next_power_of_2(width)
    warps = min(16, max(4, tile // 512))
    arguments = (hidden, weight, residual, out, stream, hidden.stride(0), width, epsilon)
    gpu.start(Launch(_rms_norm, (tokens,), arguments, {"TILE": tile}, warps=warps))
    return out, stream
