"""Rows that begin with the same blocks: with one read for all of them and without, steps and attention alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.drive import some_weights, with_memory
from benchmarks.gpu_parts.kernels import distance
from benchmarks.gpu_parts.machine import Machine, replayed, seconds, synchronize
from benchmarks.gpu_parts.models import Sizes, kv_bytes_per_token
from benchmarks.gpu_parts.report import Report
from shards.exec.batch import Row
from shards.exec.drawing import GREEDY
from shards.gpu.decoder import GpuDecoder
from shards.gpu.network import GpuNetwork
from shards.gpu.sharing import fill_sharing, sharing_of
from shards.gpu.spans import Span, step_of_spans
from shards.gpu.step import StepOptions
from shards.gpu.transfers import Ticket
from shards.kernels.paged_decode import (
    SPLIT_TOKENS,
    DecodePlan,
    SharedSplits,
    most_readers,
    paged_decode,
    plan_decode,
    splits_of,
)
from shards.network.config import NetworkConfig

Tables = Sequence[Sequence[int]]

MOST_SHARE = 0.8
"""Share of the free memory for two caches; the rest is for steps and their graphs."""

LAYERS = 8
"""Layers of attention alone: with the shape below 2.5 GB of an 8B model's KV, more than any chip's cache holds."""


def tables_of(rows: int, common: int, own: int) -> Tables:
    """The blocks of `rows` rows of `common` and `own` tokens; the common ones are those of all rows."""
    shared, alone = common // 64, -(-own // 64)
    return [[*range(shared), *range(first, first + alone)] for first in range(shared, shared + rows * alone, alone)]


def shared_attention(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """Milliseconds a layer, with tiles of as many readers; and what tiles cost rows that share nothing."""
    few = most_readers(config.heads // config.kv_heads)
    for shape in (sizes.shared, (sizes.shared[0], 0, sizes.shared[2])):
        tables = tables_of(*shape)
        kv = _random_kv(machine, config, 1 + max(map(max, tables)))
        alone = _attention(machine, config, kv, tables, shape, readers=1)
        expected = alone()
        for readers in sorted({1, few, 2 * few, 4 * few}):
            label = f"attention, {name}, {shape[0]} x ({shape[1]} + {shape[2]}), {readers} readers"

            def measure(
                label: str = label, readers: int = readers, kv: torch.Tensor = kv, tables: Tables = tables,
                shape: tuple[int, int, int] = shape, expected: list[torch.Tensor] = expected,
            ) -> None:  # fmt: skip
                work = _attention(machine, config, kv, tables, shape, readers=readers)
                off = max(distance(*pair) for pair in zip(work(), expected, strict=True))
                # in a tile of the same size every row is computed alike
                report.check(label, off, 0 if readers <= few else 2e-2)
                spent = seconds(replayed(work, machine.device), machine.device) / len(expected)
                read = (shape[1] + shape[0] * shape[2]) * _layer_bytes(machine, config)
                floor = read / machine.copy_gb_s / 1e6
                report.add("shared", label, 1e3 * spent, floor=floor, unit="ms", note="a layer, with merging")

            report.attempt(label, measure, needs_s=5)


def shared_steps(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """Whole steps with the same KV: first the same bits, then milliseconds."""
    rows, common, own = sizes.shared
    tables, weights = tables_of(rows, common, own), some_weights(machine, config)
    blocks = 1 + max(map(max, tables))
    # one decoder for both, without dense attention: nothing is timed and little is compiled before the steps
    decoder = GpuDecoder(config, weights)
    together, apart = (GpuNetwork(decoder, options=StepOptions(shares=shares)) for shares in (True, False))
    free = MOST_SHARE * torch.cuda.mem_get_info(machine.device)[0] if machine.is_gpu else None
    room = None if free is None else int(free) // together.block_bytes
    if not report.fits(f"shared prefix, {name}", 2 * blocks, room):
        return
    for network in (together, apart):
        with_memory(network, blocks)
    together.steps.cache.data.normal_()
    apart.steps.cache.data.copy_(together.steps.cache.data)
    context = common + own - sizes.steps
    known = [Span(row, [row], context - 1, table, GREEDY) for row, table in enumerate(tables)]
    chunk = [*known[:-1], Span(rows - 1, [7] * min(50, own), common, tables[-1], GREEDY)]
    for what, spans in (("step", known), ("step with a chunk", chunk)):
        step = step_of_spans(spans)
        differing = (together.steps.logits(step) != apart.steps.logits(step)).sum().item()
        report.check(f"{name}: {what}, logits that differ once blocks are shared", float(differing), 0)
    for way, network in (("shared", together), ("apart", apart)):
        work = partial(_step_seconds, machine, network, tables, context, sizes.steps)
        label = f"step, {name}, {rows} x ({common} + {own}), {way}"
        read = weights.bytes_per_step
        read += (common + rows * (context - common)) * kv_bytes_per_token(config, machine.dtype.itemsize)
        floor = 1e3 * read / machine.copy_gb_s / 1e9
        report.add("shared", label, 1e3 * work(), floor=floor, unit="ms", note="floor: each block once")


def _step_seconds(machine: Machine, network: GpuNetwork, tables: Tables, context: int, count: int) -> float:
    """The time of a step, one ahead of the host; contexts grow with the steps."""
    steps, started = network.steps, 0.0
    steps.warm_up([len(tables)])
    due: list[Ticket] = []
    for number in range(count):
        if number == count // 2:
            synchronize(machine.device)
            started = time.perf_counter()
        spans = [Span(row, None, context + number - 1, table, GREEDY) for row, table in enumerate(tables)]
        due.append(steps.submit(step_of_spans(spans)))
        if len(due) > 1:
            steps.collect(due.pop(0))
    steps.collect(due.pop(0))
    return (time.perf_counter() - started) / (count - count // 2)


def _layer_bytes(machine: Machine, config: NetworkConfig) -> int:
    return 2 * config.kv_heads * config.head_dim * machine.dtype.itemsize


def _random_kv(machine: Machine, config: NetworkConfig, blocks: int) -> torch.Tensor:
    layers = LAYERS if machine.is_gpu else 1
    shape = (blocks, layers, 2, config.kv_heads, 64, config.head_dim)
    return torch.randn(shape, dtype=machine.dtype, device=machine.device)


def _attention(
    machine: Machine,
    config: NetworkConfig,
    kv: torch.Tensor,
    tables: Tables,
    shape: tuple[int, int, int],
    *,
    readers: int,
) -> Any:
    """Attention of all layers of `kv`, with up to `readers` rows in a tile; 1 shares nothing."""
    rows, common, own = shape
    contexts = [common + own] * rows
    numbers = np.array(tables, dtype=np.int32)
    found = sharing_of(
        [Row(0, 1, common + own, tuple(table)) for table in tables] if readers > 1 else [],
        numbers,
        split_pages=SPLIT_TOKENS // 64,
    )
    arrays = {
        name: np.zeros(width, np.int32) for name, width in (("spans", (rows, 4)), ("readers", rows), ("own", rows))
    }
    fill_sharing(arrays, found)
    shared = SharedSplits(**{name: torch.from_numpy(array).to(machine.device) for name, array in arrays.items()})
    size: dict[str, Any] = {"heads": config.heads, "dim": config.head_dim, "device": machine.device}
    plan = DecodePlan.with_room(rows, splits_of(contexts), **size, readers=readers)
    counts = torch.tensor(contexts, dtype=torch.int32, device=machine.device)
    plan_decode(plan, counts, shared=shared, contexts=contexts)
    torch.manual_seed(0)
    query = torch.randn(rows, config.heads, config.head_dim, device=machine.device).to(machine.dtype)
    given: dict[str, Any] = {"tables": torch.from_numpy(numbers).to(machine.device), "context_tokens": counts}

    def work() -> list[torch.Tensor]:
        return [paged_decode(query, kv[:, layer], plan=plan, **given) for layer in range(kv.shape[1])]

    return work
