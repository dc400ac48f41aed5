"""Where a step's time goes: its kernels by their time on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.drive import some_weights, with_memory
from benchmarks.gpu_parts.machine import Machine, synchronize
from benchmarks.gpu_parts.models import Sizes
from benchmarks.gpu_parts.report import Report
from shards.exec.drawing import Drawing
from shards.gpu.network import GpuNetwork
from shards.gpu.spans import Span, step_of_spans
from shards.gpu.transfers import Ticket
from shards.network.config import NetworkConfig

SHOWN = 12
"""Kernels that are listed for each kind of step."""


def kernel_times(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """Milliseconds per step of the longest kernels: of decoding steps, greedy and drawn, and of a chunk."""
    network = GpuNetwork.of(config, some_weights(machine, config))
    rows, context, steps = (64, 1024, 20) if machine.is_gpu else (1, 3, 2)
    pages, chunk_pages = -(-(context + steps) // 64), -(-sizes.chunk_tokens // 64)
    with_memory(network, max(rows * pages, chunk_pages))
    network.steps.warm_up([rows])

    def decode(drawing: Drawing) -> None:
        spans = [Span(row, None, context - 1, range(row * pages, (row + 1) * pages), drawing) for row in range(rows)]
        due: list[Ticket] = []
        for _ in range(steps):
            due.append(network.steps.submit(step_of_spans(spans)))
            if len(due) > 1:
                network.steps.collect(due.pop(0))
        network.steps.collect(due.pop(0))

    def chunk() -> None:
        tokens = torch.randint(0, config.vocab_size, (sizes.chunk_tokens,)).tolist()
        spans = [Span(0, tokens, 0, range(chunk_pages), Drawing())]
        network.steps.collect(network.steps.submit(step_of_spans(spans)))

    drawn = Drawing(temperature=1.0, top_p=0.95, seed=1)
    label = f"{name}, {rows} x {context}"
    _add(report, machine, f"{label}, greedy", lambda: decode(Drawing()), steps)
    _add(report, machine, f"{label}, drawn", lambda: decode(drawn), steps)
    _add(report, machine, f"{name}, chunk of {sizes.chunk_tokens}", chunk, 1)


def _add(report: Report, machine: Machine, label: str, work: Callable[[], None], steps: int) -> None:
    work()
    synchronize(machine.device)
    # a dry run has operators instead of kernels
    activity = ProfilerActivity.CUDA if machine.is_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        work()
        synchronize(machine.device)
    kernels = [
        ((row.device_time_total if machine.is_gpu else row.self_cpu_time_total) / 1e3 / steps, row)
        for row in profiled.key_averages()
    ]
    report.add("times", f"{label}, all kernels", sum(spent for spent, _ in kernels), unit="ms")
    for spent, row in sorted(kernels, key=lambda pair: -pair[0])[:SHOWN]:
        report.add("times", f"{label}, {row.key[:40]}", spent, unit="ms", note=f"{row.count / steps:.0f} launches")
