"""Decode and prefill: the kernels by themselves, whole models, and torch's own attention for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_parts.drive import blocks_in_room, some_weights, with_memory
from benchmarks.gpu_parts.machine import Machine, replayed, seconds, synchronize
from benchmarks.gpu_parts.models import (
    Sizes,
    attention_flops,
    kv_bytes_per_token,
    linear_parameters,
    prefill_flops,
)
from benchmarks.gpu_parts.report import Report
from shards.exec.drawing import Drawing
from shards.gpu.network import GpuNetwork
from shards.gpu.spans import Span, step_of_spans
from shards.gpu.transfers import Ticket
from shards.kernels.gather_prefill import gather_prefill
from shards.kernels.launch import Gpu, gpu_of
from shards.kernels.paged_decode import DecodePlan, paged_decode, plan_decode, splits_of
from shards.kernels.paged_prefill import Tile, paged_prefill, plan_prefill, tiles_at_once
from shards.network.config import NetworkConfig

# more than any chip's cache holds, so that memory is measured
SPREAD_BYTES = 1 << 29


def decode_attention(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    for batch, context in sizes.decode:
        size = kv_bytes_per_token(config, machine.dtype.itemsize) // config.layers * batch * context
        layers = min(config.layers, max(1, SPREAD_BYTES // size)) if machine.is_gpu else 1

        def measure(batch: int = batch, context: int = context, size: int = size, layers: int = layers) -> None:
            label = f"{name}, {batch} x {context}"
            query = torch.randn(batch, heads, dim, device=machine.device).to(machine.dtype)
            paged = decode_work(machine, query, layers, context, kv_heads)
            rate = layers * size / seconds(replayed(paged, machine.device), machine.device) / 1e9
            report.add("decode", f"attention, {label}", rate, floor=machine.copy_gb_s, unit="GB/s")
            shape = (layers, 2, batch, kv_heads, context, dim)
            dense = torch.randn(shape, dtype=machine.dtype, device=machine.device)

            def by_torch() -> list[torch.Tensor]:
                rows = query[:, :, None]
                return [scaled_dot_product_attention(rows, layer[0], layer[1], enable_gqa=True) for layer in dense]

            rate = layers * size / seconds(replayed(by_torch, machine.device), machine.device) / 1e9
            report.add("decode", f"torch's SDPA, contiguous, {label}", rate, floor=machine.copy_gb_s, unit="GB/s")

        report.attempt(f"decode attention, {name}, {batch} x {context}", measure, needs_s=10)


def decode_work(
    machine: Machine, query: torch.Tensor, layers: int, context: int, kv_heads: int, *, gpu: Gpu | None = None
) -> Callable[[], list[torch.Tensor]]:
    """Attention of all layers over pages in random order."""
    (batch, heads, dim), device = query.shape, machine.device
    pages = -(-context // 64)
    kv = torch.randn(batch * pages, layers, 2, kv_heads, 64, dim, dtype=machine.dtype, device=device)
    tables = torch.randperm(batch * pages, device=device).int().view(batch, pages)
    contexts = torch.full((batch,), context, dtype=torch.int32, device=device)
    plan = DecodePlan.with_room(batch, splits_of([context] * batch), heads=heads, dim=dim, device=device)
    plan_decode(plan, contexts, contexts=[context] * batch)

    def work() -> list[torch.Tensor]:
        shared: dict[str, Any] = {"tables": tables, "context_tokens": contexts, "plan": plan, "gpu": gpu}
        return [paged_decode(query, kv[:, layer], **shared) for layer in range(layers)]

    return work


def decode_model(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """Whole steps, one ahead of the host: the best case of an engine."""
    weights = some_weights(machine, config)
    itemsize = machine.dtype.itemsize
    network = GpuNetwork.of(config, weights)
    most_rows = max(batch for batch, _ in sizes.decode)
    room = blocks_in_room(machine, network, batch_tokens=most_rows, rows=most_rows)
    blocks = {
        (batch, context): batch * -(-(context + sizes.steps) // 64)
        for batch, context in sizes.decode
        if context < config.max_positions
    }
    fitting = [
        size for size in blocks if report.fits(f"decode step, {name}, {size[0]} x {size[1]}", blocks[size], room)
    ]
    if not fitting:
        return
    with_memory(network, max(blocks[size] for size in fitting))
    for batch, context in fitting:

        def measure(batch: int = batch, context: int = context) -> None:
            steps, pages = network.steps, -(-(context + sizes.steps) // 64)
            steps.warm_up([batch])
            due: list[Ticket] = []
            started = 0.0
            for number in range(sizes.steps):
                if number == sizes.steps // 2:
                    synchronize(machine.device)
                    started = time.perf_counter()
                computed = context - 1
                spans = [
                    Span(row, None, computed, range(row * pages, (row + 1) * pages), Drawing()) for row in range(batch)
                ]
                due.append(steps.submit(step_of_spans(spans)))
                if len(due) > 1:
                    steps.collect(due.pop(0))
            steps.collect(due.pop(0))
            step_s = (time.perf_counter() - started) / (sizes.steps - sizes.steps // 2)
            read = weights.bytes_per_step + batch * context * kv_bytes_per_token(config, itemsize)
            linear = 2 * batch * (linear_parameters(config) + config.vocab_size * config.hidden_size)
            floor_s = max(read / machine.copy_gb_s / 1e9, linear / machine.matmul_tflops / 1e12)
            note = f"{batch / step_s:.0f} tok/s, {read / step_s / 1e9:.0f} GB/s"
            report.add(
                "decode", f"step, {name}, {batch} x {context}", step_s * 1e3, floor=floor_s * 1e3, unit="ms", note=note
            )

        report.attempt(f"decode step, {name}, {batch} x {context}", measure, needs_s=10)


def prefill_attention(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    heads, kv_heads, dim, device = config.heads, config.kv_heads, config.head_dim, machine.device
    tile = Tile.of(gpu_of(device), group=heads // kv_heads, dim=dim, dtype=machine.dtype)
    for context in sizes.prefill_contexts:
        new = min(sizes.chunk_tokens, context)
        flops = attention_flops(config, new, context)

        def measure(context: int = context, new: int = new, flops: float = flops) -> None:
            pages = -(-context // 64)
            kv = torch.randn(pages, 2, kv_heads, 64, dim, dtype=machine.dtype, device=device)
            query = torch.randn(new, heads, dim, dtype=machine.dtype, device=device)
            shared: dict[str, Any] = {
                "tables": torch.randperm(pages, device=device).int()[None],
                "plan": plan_prefill([new], [context], tile=tile, device=device),
            }
            lists: dict[str, Any] = {"new_tokens": [new], "context_tokens": [context]}
            key, value = torch.randn(2, 1, kv_heads, context, dim, dtype=machine.dtype, device=device)
            ways: dict[str, Callable[[], object]] = {"our kernel": partial(paged_prefill, query, kv, **shared)}
            for dense in ("flash", "cudnn"):
                ways[f"gathered, {dense}"] = partial(gather_prefill, query, kv, dense=dense, **lists, **shared)
            is_whole = new == context

            def by_torch() -> torch.Tensor:
                wide = query.transpose(0, 1)[None]
                return scaled_dot_product_attention(wide, key, value, is_causal=is_whole, enable_gqa=True)

            ways["torch's SDPA, contiguous"] = by_torch
            for way, work in ways.items():
                with report.survive(f"prefill attention, {way}"):
                    unmasked = way.startswith("torch") and not is_whole
                    done = 4.0 * heads * dim * new * context if unmasked else flops
                    rate = done / seconds(work, device, repeats=3) / 1e12
                    label = f"attention, {name}, {new} at {context}, {way}"
                    note = "no mask" if unmasked else ""
                    report.add("prefill", label, rate, floor=machine.matmul_tflops, unit="TFLOP/s", note=note)

        report.attempt(f"prefill attention, {name}, {context}", measure, needs_s=10)


def short_chunks(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """Attention of chunks that leave most of the GPU idle unless their context is cut into parts."""
    heads, kv_heads, dim, device = config.heads, config.kv_heads, config.head_dim, machine.device
    tile = Tile.of(gpu_of(device), group=heads // kv_heads, dim=dim, dtype=machine.dtype)
    context = sizes.prefill_contexts[-1]
    kv = torch.randn(-(-context // 64), 2, kv_heads, 64, dim, dtype=machine.dtype, device=device)
    tables = torch.randperm(len(kv), device=device).int()[None]
    for new in (min(context, tokens) for tokens in sizes.short_chunks):
        query = torch.randn(new, heads, dim, dtype=machine.dtype, device=device)
        for label, at_once in (("whole", None), ("in parts", tiles_at_once(gpu_of(device), kv_heads=kv_heads))):
            plan = plan_prefill([new], [context], tile=tile, device=device, at_once=at_once)
            with report.survive(f"a short chunk, {label}"):
                spent = seconds(partial(paged_prefill, query, kv, tables=tables, plan=plan), device, repeats=3)
                rate, note = attention_flops(config, new, context) / spent / 1e12, f"{spent * 1e6:.0f} us"
                what = f"attention, {name}, {new} at {context}, {label}"
                report.add("prefill", what, rate, floor=machine.matmul_tflops, unit="TFLOP/s", note=note)


def prefill_model(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """A whole prompt, chunk by chunk, with no other work."""
    network = GpuNetwork.of(config, some_weights(machine, config))
    room = blocks_in_room(machine, network, batch_tokens=sizes.chunk_tokens, rows=1)
    known = [tokens for tokens in sizes.prefill_contexts if tokens <= config.max_positions]
    fitting = [tokens for tokens in known if report.fits(f"prompt, {name}, {tokens}", -(-tokens // 64), room)]
    if not fitting:
        return
    blocks = -(-max(fitting) // 64)
    with_memory(network, blocks)
    for tokens in fitting:
        flops = prefill_flops(config, tokens)
        floor_s = flops / machine.matmul_tflops / 1e12

        def measure(tokens: int = tokens, flops: float = flops) -> None:
            known = torch.randint(0, config.vocab_size, (tokens,)).tolist()
            chunk = sizes.chunk_tokens if machine.is_gpu else tokens
            # the first chunk compiles kernels
            network.steps.collect(network.steps.submit(step_of_spans([Span(0, known[:chunk], 0, range(blocks))])))
            synchronize(machine.device)
            started = time.perf_counter()
            for start in range(0, tokens, chunk):
                stop = min(tokens, start + chunk)
                drawing = Drawing() if stop == tokens else None
                span = Span(0, known[start:stop], start, range(blocks), drawing)
                network.steps.collect(network.steps.submit(step_of_spans([span])))
            spent_s = time.perf_counter() - started
            note = f"{spent_s * 1e3:.0f} ms, {tokens / spent_s:.0f} tok/s"
            label = f"prompt, {name}, {tokens}"
            floor = machine.matmul_tflops
            report.add("prefill", label, flops / spent_s / 1e12, floor=floor, unit="TFLOP/s", note=note)

        report.attempt(f"prompt, {name}, {tokens}", measure, needs_s=10 + 3 * floor_s)
