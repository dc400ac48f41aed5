"""The layout of one layer of the KV cache, as kernels see it."""

from __future__ import annotations

import torch

from shards.kernels.launch import Gpu, require, require_shape

# 64 positions x 128 dimensions of bf16 are 16 KiB in one piece: one tile of a kernel, one descriptor box on Hopper.
BLOCK_TOKENS = 64

# The storage types of a quantised cache, and the largest value of each.
QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def has_kernels_for(kv_dtype: torch.dtype, gpu: Gpu) -> bool:
    """Whether `gpu` reads and writes KV of this type."""
    return kv_dtype != torch.float8_e4m3fn or gpu.chip.has_e4m3


def require_layer(kv: torch.Tensor, scales: torch.Tensor | None, gpu: Gpu) -> None:
    """Raise ValueError unless these are one layer's views of a cache, and of its scales, that `gpu` can read.

    kv [blocks, k|v, kv_heads, 64, dim], with each head's [64, dim] contiguous: `cache[:, layer]`. scales [blocks,
    k|v, kv_heads, 64] float32, one per token and head: present exactly if kv is int8 or float8_e4m3fn.
    """
    require(kv.dim() == 5, f"kv has {kv.dim()} dimensions, not [blocks, 2, kv_heads, {BLOCK_TOKENS}, dim]")
    blocks, _, heads, _, dim = kv.shape
    require_shape("kv", kv, (blocks, 2, heads, BLOCK_TOKENS, dim))
    require(kv.stride()[3:] == (dim, 1), "one head's [positions, dim] in kv is not in one piece")
    require((kv.dtype in QUANTISED) == (scales is not None), f"scales go with int8 and e4m3, and kv is {kv.dtype}")
    require(has_kernels_for(kv.dtype, gpu), f"{gpu.chip.name} has no e4m3: use int8")
    if scales is not None:
        require_shape("scales", scales, (blocks, 2, heads, BLOCK_TOKENS))
        require(scales.stride(3) == 1, "one head's positions in scales are not in one piece")
        require(scales.dtype == torch.float32, f"scales are {scales.dtype}, not float32")


def strides(kv: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, ...]:
    """Strides in elements from block to block, from keys to values and from head to head: of kv, then of scales."""
    of_scales = (0, 0, 0) if scales is None else scales.stride()[:3]
    return (*kv.stride()[:3], *of_scales)
