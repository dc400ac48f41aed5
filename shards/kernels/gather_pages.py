"""Copies the pages of one sequence side by side, in a floating type, as dense attention kernels need them."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shards.kernels.cache import BLOCK_TOKENS, require_layer, strides
from shards.kernels.launch import Gpu, Launch, gpu_of, require


def gather_pages_reference(
    kv: torch.Tensor, table: torch.Tensor, *, tokens: int, dtype: torch.dtype, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """The first `tokens` keys and values of a sequence. The reference for `gather_pages`.

    Shapes: kv and scales are one layer of the cache, as in `require_layer`; table [pages] are the ids of the blocks
    that hold positions 0.., 64.. and so on, integers; result [k|v, kv_heads, tokens, dim] of `dtype`, a floating type.
    """
    blocks = table[: -(-tokens // BLOCK_TOKENS)].long()
    pages = kv[blocks].float()
    if scales is not None:
        pages = pages * scales[blocks][..., None]
    return pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens].to(dtype)


# contexts grow, and a table is any row of a wider one: one compilation serves all
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["table"])
def _gather_pages(
    kv,
    scales,
    table,
    out,
    tokens,
    kv_block,
    kv_side,
    kv_head,
    scales_block,
    scales_side,
    scales_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    page = tl.program_id(0)
    side = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    dims = tl.arange(0, DIM_TILE)[None, :]
    offsets = tl.arange(0, BLOCK)[:, None]
    positions = page * BLOCK + offsets
    mask = (positions < tokens) & (dims < DIM)
    # int64 before multiplying: in an 8B model block 512 is already 2**31 elements away
    block = tl.load(table + page).to(tl.int64)
    at = kv + block * kv_block + side * kv_side + head * kv_head
    tile = tl.load(at + offsets * DIM + dims, mask=mask, other=0.0)
    if QUANTISED:
        scales_at = scales + block * scales_block + side * scales_side + head * scales_head
        tile = tile.to(tl.float32) * tl.load(scales_at + offsets, mask=positions < tokens, other=0.0)
    row = (side * KV_HEADS + head).to(tl.int64) * tokens
    tl.store(out + (row + positions) * DIM + dims, tile.to(out.dtype.element_ty), mask=mask)


def gather_pages(
    kv: torch.Tensor,
    table: torch.Tensor,
    *,
    tokens: int,
    dtype: torch.dtype,
    scales: torch.Tensor | None = None,
    gpu: Gpu | None = None,
) -> torch.Tensor:
    """The result of `gather_pages_reference`. Raises ValueError for other shapes and for a table that is too short."""
    gpu = gpu or gpu_of(kv.device)
    require_layer(kv, scales, gpu)
    kv_heads, dim = kv.shape[2], kv.shape[4]
    pages = triton.cdiv(tokens, BLOCK_TOKENS)
    require(table.dim() == 1 and table.is_contiguous(), f"a table is {list(table.shape)}, not [pages]")
    require(pages <= table.shape[0], f"{tokens} tokens need {pages} pages, and the table has {table.shape[0]}")
    out = torch.empty(2, kv_heads, tokens, dim, dtype=dtype, device=kv.device)
    constants = {
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "DIM_TILE": triton.next_power_of_2(dim),
        "BLOCK": BLOCK_TOKENS,
        "QUANTISED": scales is not None,
    }
    arguments = (kv, scales, table, out, tokens, *strides(kv, scales))
    gpu.start(Launch(_gather_pages, (pages, 2 * kv_heads), arguments, constants))
    return out
