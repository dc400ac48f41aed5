"""Selects the attention for long chunks, one of torch's or the paged kernel, by one measurement on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from shards.gpu.device import mark
from shards.kernels.gather_prefill import Dense, gather_prefill
from shards.kernels.launch import gpu_of
from shards.kernels.paged_prefill import PrefillPlan, Tile, paged_prefill, paged_prefill_reference, plan_prefill

_NEW_TOKENS = 2048
_PAGES = 64
"""A chunk behind as long an old context, so that both calls and their merging are tried."""

_TIMED_KV_HEADS, _TIMED_PAGES = 8, 256
"""A chunk behind 14,000 tokens: about a millisecond on a large GPU, long enough to hide the launches."""

_TOLERANCE = 2e-2

MOST_PLANNING_S = 5e-3
"""Most extra time for a context length that is new to the process. Every chunk has one, in every step: cuDNN plans
each length anew, for 40 to 400 ms, and keeps the plan forever (pytorch#155958, sglang#4650)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a chunk with a `new` context length, and of the same chunk `again`."""

    new: float
    again: float


def fastest(timings: Mapping[Dense | None, Timing]) -> Dense | None:
    """The attention with the shortest time among those that need no planning for each length; None: paged kernel."""
    fit = {name: timing.again for name, timing in timings.items() if timing.new - timing.again <= MOST_PLANNING_S}
    return min(fit, key=fit.__getitem__, default=None)


@lru_cache
def dense_attention(device: torch.device, dtype: torch.dtype, head_dim: int, group: int = 2) -> Dense | None:
    """The fastest correct attention here for `group` heads to a KV head; None if the paged kernel is as fast.

    cuDNN's is FlashAttention-3 on Hopper; `flash` is FlashAttention-2 everywhere. Both are private operators of torch,
    and they change.
    """
    timings: dict[Dense | None, Timing] = {}
    for dense in ("cudnn", "flash"):
        # the CPU has one operator, for float32, under both names
        if device.type == "cpu" and (dense, dtype) != ("flash", torch.float32):
            continue
        try:
            error = _error_of(dense, device, dtype, head_dim)
            if error > _TOLERANCE:
                log.warning("dense attention %s is off by %.3g here and is not used", dense, error)
            elif device.type == "cpu":
                # times in the interpreter mean nothing
                return dense
            else:
                timings[dense] = _timing_of(dense, device, dtype, head_dim, group)
        except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError) as failure:
            log.info("dense attention %s does not run here: %s", dense, failure)
    if timings:
        timings[None] = _timing_of(None, device, dtype, head_dim, group)
        log.info("a chunk of %d tokens takes %s", _NEW_TOKENS, timings)
    return fastest(timings)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of random tokens behind an old context."""

    query: Tensor
    kv: Tensor
    table: Tensor
    plan: PrefillPlan

    @classmethod
    def of(
        cls, device: torch.device, dtype: torch.dtype, *, pages: int, kv_heads: int, group: int, head_dim: int
    ) -> _Chunk:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        tile = Tile.of(gpu_of(device), group=group, dim=head_dim, dtype=dtype)
        return cls(
            query=draw(_NEW_TOKENS, group * kv_heads, head_dim),
            kv=draw(pages, 2, kv_heads, 64, head_dim),
            table=torch.randperm(pages, generator=generator, device=device).int()[None],
            plan=plan_prefill([_NEW_TOKENS], [64 * pages], tile=tile, device=device),
        )

    def attend(self, dense: Dense | None) -> Tensor:
        if dense is None:
            return paged_prefill(self.query, self.kv, tables=self.table, plan=self.plan)
        return gather_prefill(
            self.query,
            self.kv,
            tables=self.table,
            plan=self.plan,
            new_tokens=[_NEW_TOKENS],
            context_tokens=[64 * self.table.shape[1]],
            dense=dense,
        )


def _error_of(dense: Dense, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """The largest error of a chunk with two heads to a group."""
    chunk = _Chunk.of(device, dtype, pages=_PAGES, kv_heads=1, group=2, head_dim=head_dim)
    expected = paged_prefill_reference(chunk.query, chunk.kv, tables=chunk.table, plan=chunk.plan)
    return (chunk.attend(dense).float() - expected.float()).abs().max().item()


def _timing_of(dense: Dense | None, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Timing:
    """Times the longest context first: shorter ones then find allocated memory, and show only their planning."""
    of = {"kv_heads": _TIMED_KV_HEADS, "group": group, "head_dim": head_dim}
    seen, *unseen = (_Chunk.of(device, dtype, pages=_TIMED_PAGES - less, **of) for less in range(3))
    _seconds(partial(seen.attend, dense), device)
    new = min(_seconds(partial(chunk.attend, dense), device) for chunk in unseen)
    return Timing(new, min(_seconds(partial(chunk.attend, dense), device) for chunk in unseen))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    mark(device).synchronize()
    started = time.perf_counter()
    work()
    mark(device).synchronize()
    return time.perf_counter() - started
