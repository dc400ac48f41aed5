"""Rotates queries and keys, normalises them if the model does, and writes keys and values to the cache."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shards.kernels.cache import BLOCK_TOKENS, QUANTISED, require_layer, strides
from shards.kernels.launch import INTERPRETED, Gpu, Launch, gpu_of, require, require_shape


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each head before its rotation, as in Qwen3. query and key [dim]: its weights."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of both halves of a head (Su et al., "RoFormer"). cos and sin [positions, dim / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


def kv_write_reference(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
    *,
    kv: torch.Tensor,
    rotation: Rotation,
    norm: HeadNorm | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries, normalised and rotated; writes keys, treated alike, and values to the cache. Reference for `kv_write`.

    Shapes: qkv is query [tokens, heads, dim] and key, value [tokens, kv_heads, dim]; places is positions [tokens] and
    slots [tokens] (block * 64 + offset), integers; kv and scales are one layer of the cache, as in `require_layer`;
    returned [tokens, heads, dim]. All in float32, rounded once. A quantised value is value / scale, rounded to nearest
    (int8: halves upwards); scale is the largest magnitude of that token and head, divided by the largest of the type.
    """
    (query, key, value), (positions, slots) = qkv, places
    cos, sin = (table[positions.long()].float()[:, None] for table in (rotation.cos, rotation.sin))

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.float()
        if norm is not None and weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon) * weight.float()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    blocks, offsets = slots.long() // BLOCK_TOKENS, slots.long() % BLOCK_TOKENS
    for side, wide in enumerate((turned(key, norm.key if norm else None), value.float())):
        stored = wide
        if scales is not None:
            stored, scales[blocks, side, :, offsets] = quantise_reference(wide, kv.dtype)
        kv[blocks, side, :, offsets] = stored.to(kv.dtype)
    return turned(query, norm.query if norm else None).to(query.dtype)


def quantise_reference(wide: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., dim] as int8 or e4m3, and the scales [...] by which to multiply it again.

    The scale of zeros is 1, because dividing by their magnitude is impossible.
    """
    magnitude = wide.abs().amax(dim=-1)
    scale = torch.where(magnitude > 0, magnitude / QUANTISED[dtype], 1.0)
    quotient = wide / scale[..., None]
    return (torch.floor(quotient + 0.5) if dtype == torch.int8 else quotient).to(dtype), scale


@triton.jit
def _turned(at, weight, cos, sin, row_mask, mask, epsilon, DIM: tl.constexpr, HALF: tl.constexpr):
    """Both halves [heads, half] of heads at `at`, normalised and rotated, in float32."""
    low = tl.load(at, mask=row_mask & mask, other=0.0).to(tl.float32)
    high = tl.load(at + DIM // 2, mask=row_mask & mask, other=0.0).to(tl.float32)
    if weight is not None:
        half = tl.arange(0, HALF)[None, :]
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / DIM + epsilon)
        low *= scale[:, None] * tl.load(weight + half, mask=mask, other=0.0).to(tl.float32)
        high *= scale[:, None] * tl.load(weight + DIM // 2 + half, mask=mask, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _on_the_grid(x):
    """x rounded to 4 significant bits, or to multiples of 2**-9 where e4m3 is subnormal; below 2**100."""
    # Veltkamp's splitting, and the spacing of float32 between 2**14 and 2**15
    wide = x * 1048577.0
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, wide - (wide - x))


@triton.jit
def _put(kv_at, scales_at, low, high, row_mask, mask, LARGEST: tl.constexpr, DIM: tl.constexpr):
    """Write both halves of heads to `kv_at`, [heads, half], and their scales to `scales_at`, [heads, 1]."""
    if LARGEST > 0:
        magnitude = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))[:, None]
        scale = tl.where(magnitude > 0, magnitude / LARGEST, 1.0)
        tl.store(scales_at, scale, mask=row_mask)
        # the quotient of the largest value may round beyond the range of the type
        low = tl.minimum(tl.maximum(low / scale, -LARGEST), LARGEST)
        high = tl.minimum(tl.maximum(high / scale, -LARGEST), LARGEST)
        if kv_at.dtype.element_ty == tl.int8:
            low = tl.floor(low + 0.5)
            high = tl.floor(high + 0.5)
        elif INTERPRETED:
            # the interpreter's conversion loses the carry of 15.9 to 16
            low = _on_the_grid(low)
            high = _on_the_grid(high)
    tl.store(kv_at, low.to(kv_at.dtype.element_ty), mask=row_mask & mask)
    tl.store(kv_at + DIM // 2, high.to(kv_at.dtype.element_ty), mask=row_mask & mask)


@triton.jit
def _kv_write(
    query,
    key,
    value,
    positions,
    slots,
    kv,
    scales,
    cos,
    sin,
    query_weight,
    key_weight,
    out,
    query_token,
    key_token,
    value_token,
    kv_block,
    kv_side,
    kv_head,
    scales_block,
    scales_side,
    scales_head,
    heads,
    kv_heads,
    epsilon,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(heads, TILE)
    half = tl.arange(0, HALF)[None, :]
    mask = half < DIM // 2
    position = tl.load(positions + token).to(tl.int64)
    angle_cos = tl.load(cos + position * (DIM // 2) + half, mask=mask, other=0.0)
    angle_sin = tl.load(sin + position * (DIM // 2) + half, mask=mask, other=0.0)
    if part < query_parts:
        head = part * TILE + tl.arange(0, TILE)[:, None]
        in_row = head < heads
        at = query + token * query_token + head * DIM + half
        low, high = _turned(at, query_weight, angle_cos, angle_sin, in_row, mask, epsilon, DIM, HALF)
        at_out = out + token * heads * DIM + head * DIM + half
        tl.store(at_out, low.to(out.dtype.element_ty), mask=in_row & mask)
        tl.store(at_out + DIM // 2, high.to(out.dtype.element_ty), mask=in_row & mask)
    else:
        head = (part - query_parts) * TILE + tl.arange(0, TILE)[:, None]
        in_row = head < kv_heads
        # int64 before multiplying: in an 8B model block 512 is already 2**31 elements away
        slot = tl.load(slots + token).to(tl.int64)
        block = slot // BLOCK
        offset = slot % BLOCK
        at_kv = kv + block * kv_block + head * kv_head + offset * DIM + half
        at_scales = scales
        if LARGEST > 0:
            at_scales = scales + block * scales_block + head * scales_head + offset
        at = key + token * key_token + head * DIM + half
        low, high = _turned(at, key_weight, angle_cos, angle_sin, in_row, mask, epsilon, DIM, HALF)
        _put(at_kv, at_scales, low, high, in_row, mask, LARGEST, DIM)
        at = value + token * value_token + head * DIM + half
        low = tl.load(at, mask=in_row & mask, other=0.0).to(tl.float32)
        high = tl.load(at + DIM // 2, mask=in_row & mask, other=0.0).to(tl.float32)
        if LARGEST > 0:
            at_scales += scales_side
        _put(at_kv + kv_side, at_scales, low, high, in_row, mask, LARGEST, DIM)


def kv_write(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
    *,
    kv: torch.Tensor,
    rotation: Rotation,
    norm: HeadNorm | None = None,
    scales: torch.Tensor | None = None,
    gpu: Gpu | None = None,
) -> torch.Tensor:
    """The result and effect of `kv_write_reference`. Raises ValueError for other shapes.

    query, key and value may be slices of one projection: only a token's [heads, dim] must be contiguous. Two tokens may
    share a slot only if it is never read: padding goes to the padding block.
    """
    (query, key, value), (positions, slots) = qkv, places
    gpu = gpu or gpu_of(query.device)
    require_layer(kv, scales, gpu)
    _require_matching(qkv, places, kv, rotation)
    (tokens, heads, dim), kv_heads = query.shape, kv.shape[2]
    out = query.new_empty(tokens, heads, dim)
    weights = (None, None) if norm is None else (norm.query, norm.key)
    # 8 heads of 128 are 2 KiB in bf16: 16 bytes for each of 128 threads
    tile = min(8, triton.next_power_of_2(max(heads, kv_heads)))
    arguments = (
        *(query, key, value, positions, slots, kv, scales, rotation.cos, rotation.sin, *weights, out),
        *(x.stride(0) for x in qkv),
        *strides(kv, scales),
        *(heads, kv_heads, 0.0 if norm is None else norm.epsilon),
    )
    constants = {
        "TILE": tile,
        "DIM": dim,
        "HALF": triton.next_power_of_2(dim // 2),
        "BLOCK": BLOCK_TOKENS,
        "LARGEST": int(QUANTISED.get(kv.dtype, 0)),
    }
    grid = (tokens, triton.cdiv(heads, tile) + triton.cdiv(kv_heads, tile))
    gpu.start(Launch(_kv_write, grid, arguments, constants))
    return out


def _require_matching(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
    kv: torch.Tensor,
    rotation: Rotation,
) -> None:
    tokens, heads, dim = qkv[0].shape
    require(dim % 2 == 0, f"heads of {dim} have no halves to rotate")
    require_shape("kv", kv, (kv.shape[0], 2, kv.shape[2], BLOCK_TOKENS, dim))
    for name, x, rows in zip(("query", "key", "value"), qkv, (heads, kv.shape[2], kv.shape[2]), strict=True):
        require_shape(name, x, (tokens, rows, dim))
        require(x.stride()[1:] == (dim, 1), f"a token's heads in {name} are not in one piece")
    for name, x in zip(("positions", "slots"), places, strict=True):
        require_shape(name, x, (tokens,))
    for name, x in (("cos", rotation.cos), ("sin", rotation.sin)):
        require_shape(name, x, (rotation.cos.shape[0], dim // 2))
        require(x.is_contiguous() and x.dtype == torch.float32, f"{name} is not contiguous float32")
