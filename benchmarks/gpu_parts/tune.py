"""The same kernels in other sizes, to find the best constants for this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.gpu_parts.machine import Machine, replayed, seconds
from benchmarks.gpu_parts.models import Sizes, attention_flops, kv_bytes_per_token
from benchmarks.gpu_parts.report import Report
from benchmarks.gpu_parts.speed import SPREAD_BYTES, decode_work
from shards.kernels.launch import Gpu, Launch, gpu_of
from shards.kernels.paged_prefill import Tile, paged_prefill, plan_prefill
from shards.network.config import NetworkConfig


@dataclass(frozen=True)
class Changed(Gpu):
    """Starts kernels called `kernel` with other warps and stages, and persistent ones with other grids."""

    kernel: str = ""
    warps: int | None = None
    stages: int | None = None
    beside: int | None = None

    def start(self, launch: Launch) -> None:
        if launch.kernel.fn.__name__ == self.kernel:
            launch = replace(launch, warps=self.warps or launch.warps, stages=self.stages or launch.stages)
            if self.beside is not None:
                launch = replace(launch, grid=(self.processors * self.beside,))
        # the base by name: slots leave `super()` without its class
        Gpu.start(self, launch)


DECODE = [
    {},
    *({"beside": beside} for beside in (2, 4, 6)),
    *({"stages": stages} for stages in (2, 4)),
    {"warps": 8, "beside": 2},
    {"warps": 2},
]
"""The settings tried for decode, besides the present ones."""

PREFILL = ((128, 4, 3), (128, 4, 2), (64, 4, 2), (64, 4, 3), (128, 8, 3))
"""Rows, warps and stages."""


def tune_decode(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    gpu = gpu_of(machine.device)
    for batch, context in sizes.tuned:
        size = kv_bytes_per_token(config, machine.dtype.itemsize) // config.layers * batch * context
        layers = min(config.layers, max(1, SPREAD_BYTES // size)) if machine.is_gpu else 1
        query = torch.randn(batch, config.heads, config.head_dim, device=machine.device).to(machine.dtype)
        for changes in DECODE if machine.is_gpu else DECODE[:2]:
            changed = Changed(gpu.chip, gpu.processors, kernel="_attend_to_splits", **changes)
            what = ", ".join(f"{key} {value}" for key, value in changes.items()) or "as it is"
            label = f"decode, {name}, {batch} x {context}, {what}"
            work = decode_work(machine, query, layers, context, config.kv_heads, gpu=changed)
            rate = partial(_gb_s, machine, layers * size, work)
            report.attempt(label, partial(_add, report, machine.copy_gb_s, "GB/s", label, rate), needs_s=8)


def tune_prefill(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    gpu, heads, kv_heads, dim = gpu_of(machine.device), config.heads, config.kv_heads, config.head_dim
    context = sizes.prefill_contexts[min(1, len(sizes.prefill_contexts) - 1)]
    new, pages = min(sizes.chunk_tokens, context), -(-context // 64)
    kv = torch.randn(pages, 2, kv_heads, 64, dim, dtype=machine.dtype, device=machine.device)
    query = torch.randn(new, heads, dim, dtype=machine.dtype, device=machine.device)
    tables = torch.randperm(pages, device=machine.device).int()[None]
    for rows, warps, stages in PREFILL if machine.is_gpu else PREFILL[:2]:
        tile = Tile(rows, warps, heads // kv_heads)
        plan = plan_prefill([new], [context], tile=tile, device=machine.device)
        changed = Changed(gpu.chip, gpu.processors, kernel="_paged_prefill", stages=stages)
        label = f"prefill, {name}, {new} at {context}, {rows} rows, {warps} warps, {stages} stages"
        work = partial(paged_prefill, query, kv, tables=tables, plan=plan, gpu=changed)
        rate = partial(_tflop_s, machine, attention_flops(config, new, context), work)
        report.attempt(label, partial(_add, report, machine.matmul_tflops, "TFLOP/s", label, rate), needs_s=8)


def _gb_s(machine: Machine, size: int, work: Callable[[], object]) -> float:
    return size / seconds(replayed(work, machine.device), machine.device) / 1e9


def _tflop_s(machine: Machine, flops: float, work: Callable[[], object]) -> float:
    return flops / seconds(work, machine.device, repeats=3) / 1e12


def _add(report: Report, floor: float, unit: str, label: str, rate: Callable[[], float]) -> None:
    report.add("tune", label, rate(), floor=floor, unit=unit)
