"""Copies KV blocks, within a cache or from one cache to another: copy on write, defragmentation, staging."""

# In Triton the constants of a kernel are upper case, and its parameters have no Python types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shards.kernels.launch import Gpu, Launch, gpu_of, require


def copy_blocks_reference(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Every `target[pairs[i, 1]]` becomes `source[pairs[i, 0]]`. The reference for `copy_blocks`.

    Shapes: source and target [blocks, ...], equal except for the number of blocks, contiguous, may be one tensor; pairs
    [pairs, from|to]. No block is written twice and, within one tensor, no block is both read and written.
    """
    target[pairs[:, 1].long()] = source[pairs[:, 0].long()]


@triton.jit
def _copy_blocks(source, target, pairs, words, TILE: tl.constexpr):
    pair = tl.program_id(0)
    # int64 before multiplying: block * words passes 2**31 in a cache of 8 GiB
    from_block = tl.load(pairs + 2 * pair).to(tl.int64)
    to_block = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    kv = tl.load(source + from_block * words + at, mask=at < words)
    tl.store(target + to_block * words + at, kv, mask=at < words)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, *, gpu: Gpu | None = None) -> None:
    """Copy blocks as `copy_blocks_reference` does, on any type, bit for bit. Raises ValueError for other shapes."""
    gpu = gpu or gpu_of(source.device)
    require(source.shape[1:] == target.shape[1:], f"blocks of {source.shape[1:]} do not fit {target.shape[1:]}")
    require(source.dtype == target.dtype, f"blocks of {source.dtype} do not fit {target.dtype}")
    require(source.is_contiguous() and target.is_contiguous(), "a cache is not contiguous")
    require(pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.is_contiguous(), "pairs are not [pairs, 2]")
    # 32-bit words: one kernel for every type, and no conversion that could change floating-point bits
    read, write = (cache.view(cache.shape[0], -1).view(torch.int32) for cache in (source, target))
    words = read.shape[1]
    # 16 KiB a program: 128 bytes a thread, enough loads in flight to reach the memory's rate
    tile = min(4096, triton.next_power_of_2(words))
    grid = (pairs.shape[0], triton.cdiv(words, tile))
    gpu.start(Launch(_copy_blocks, grid, (read, write, pairs, words), {"TILE": tile}))
