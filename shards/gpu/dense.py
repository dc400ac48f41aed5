"""Which dense attention of torch can serve long chunks here: asked of this very machine, once."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from shards.kernels.gather_prefill import Dense, gather_prefill
from shards.kernels.paged_prefill import paged_prefill_reference, plan_prefill

_PAGES, _NEW_TOKENS = 64, 2048
"""More pairs of positions than a mask is made for, so that both calls and their merging are tried."""

_TOLERANCE = 2e-2

log = logging.getLogger(__name__)


@lru_cache
def dense_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> Dense | None:
    """The fastest that runs here and is right, or None. Both are private operators of torch, and they change.

    cuDNN's is FlashAttention-3 on Hopper; `flash` is FlashAttention-2 everywhere.
    """
    for dense in ("cudnn", "flash"):
        # the CPU has one operator, for float32; it answers to either name
        if device.type == "cpu" and (dense, dtype) != ("flash", torch.float32):
            continue
        try:
            error = _error_of(dense, device, dtype, head_dim)
        except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError) as failure:
            log.info("dense attention %s does not run here: %s", dense, failure)
            continue
        if error <= _TOLERANCE:
            return dense
        log.warning("dense attention %s is off by %.3g here and is not used", dense, error)
    return None


def _error_of(dense: Dense, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """The largest error of a chunk behind an old context, two heads to a group."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    query, kv = draw(_NEW_TOKENS, 2, head_dim), draw(_PAGES, 2, 1, 64, head_dim)
    table = torch.randperm(_PAGES, generator=generator, device=device).int()[None]
    context = [64 * _PAGES]
    plan = plan_prefill([_NEW_TOKENS], context, group=2, device=device)
    shared = {"tables": table, "plan": plan}
    actual = gather_prefill(query, kv, new_tokens=[_NEW_TOKENS], context_tokens=context, dense=dense, **shared)  # type: ignore[arg-type]
    expected = paged_prefill_reference(query, kv, **shared)  # type: ignore[arg-type]
    return (actual.float() - expected.float()).abs().max().item()
