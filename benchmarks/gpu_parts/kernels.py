"""Every kernel against its reference, in the machine's own type."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.models import Sizes
from benchmarks.gpu_parts.report import Report
from shards.gpu.dense import dense_attention
from shards.kernels.copy_blocks import copy_blocks, copy_blocks_reference
from shards.kernels.draw import Draw
from shards.kernels.gate import gate, gate_reference
from shards.kernels.gather_pages import gather_pages, gather_pages_reference
from shards.kernels.gather_prefill import gather_prefill
from shards.kernels.kv_write import HeadNorm, Rotation, kv_write, kv_write_reference, quantise_reference
from shards.kernels.launch import gpu_of
from shards.kernels.norm import rms_norm, rms_norm_reference
from shards.kernels.paged_decode import DecodePlan, paged_decode, paged_decode_reference, plan_decode, splits_of
from shards.kernels.paged_prefill import Tile, paged_prefill, paged_prefill_reference, plan_prefill
from shards.kernels.sampling import sample, sample_reference

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def check_kernels(report: Report, machine: Machine, sizes: Sizes) -> None:
    torch.manual_seed(0)
    stored = [machine.dtype, torch.int8]
    if gpu_of(machine.device).chip.has_e4m3:
        stored.append(torch.float8_e4m3fn)
    for number, shape in enumerate(sizes.heads):
        # compiling takes seconds for each kernel and type: one shape has all types, the others only the model's
        for kind in stored if number == 0 else stored[:1]:
            name = f"{shape[0]}/{shape[1]} heads of {shape[2]}, {str(kind).removeprefix('torch.')}"
            measure = partial(check_attention, report, machine, sizes, name, shape, kind)
            report.attempt(f"kernels, {name}", measure, needs_s=10)
    report.attempt("kernels of rows", partial(check_rows, report, machine), needs_s=5)
    report.attempt("sampling", partial(check_sampling, report, machine), needs_s=5)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to magnitudes above 1."""
    wide = expected.float()
    return ((actual.float() - wide).abs() / wide.abs().clamp(min=1)).max().item()


def check_attention(
    report: Report,
    machine: Machine,
    sizes: Sizes,
    name: str,
    shape: tuple[int, int, int],
    kind: torch.dtype,
) -> None:
    (heads, kv_heads, dim), device, tolerance = shape, machine.device, TOLERANCE[machine.dtype]
    contexts, new = list(sizes.contexts), list(sizes.new_tokens)
    pages = [-(-context // 64) for context in contexts]
    tables = torch.zeros(len(contexts), max(pages), dtype=torch.int32, device=device)
    order = torch.randperm(sum(pages) + 3, device=device).int()
    for row, count in enumerate(pages):
        tables[row, :count], order = order[:count], order[count:]
    wide = torch.randn(sum(pages) + 3, 2, 2, kv_heads, 64, dim, device=device)
    kv, scales = wide.to(kind)[:, 1], None
    if kind.itemsize == 1:
        kv, scales = (whole[:, 1] for whole in quantise_reference(wide, kind))

    counts = torch.tensor(contexts, dtype=torch.int32, device=device)
    query = torch.randn(len(contexts), heads, dim, device=device).to(machine.dtype)
    for window in (None, 50):
        size: dict[str, Any] = {"heads": heads, "dim": dim, "device": device, "window": window}
        plan = DecodePlan.with_room(len(contexts), splits_of(contexts, window=window), **size)
        plan_decode(plan, counts, contexts=contexts)
        actual = paged_decode(query, kv, tables=tables, context_tokens=counts, plan=plan, scales=scales)
        expected = paged_decode_reference(query, kv, tables=tables, context_tokens=counts, window=window, scales=scales)
        report.check(f"paged_decode, {name}, window {window}", distance(actual, expected), tolerance)

    chunk = torch.randn(sum(new), heads, dim, device=device).to(machine.dtype)
    tile = Tile.of(gpu_of(device), group=heads // kv_heads, dim=dim, dtype=machine.dtype)
    prefill = plan_prefill(new, contexts, tile=tile, device=device)
    for window in (None, 50):
        shared: dict[str, Any] = {"tables": tables, "plan": prefill, "window": window, "scales": scales}
        expected = paged_prefill_reference(chunk, kv, **shared)
        actual = paged_prefill(chunk, kv, **shared)
        report.check(f"paged_prefill, {name}, window {window}", distance(actual, expected), tolerance)
        # the longest are cut
        cut = paged_prefill(
            chunk, kv, **shared | {"plan": plan_prefill(new, contexts, tile=tile, device=device, at_once=9)}
        )
        report.check(f"paged_prefill in parts, {name}, window {window}", distance(cut, expected), tolerance)
    lists: dict[str, Any] = {"new_tokens": new, "context_tokens": contexts}
    whole: dict[str, Any] = {"tables": tables, "plan": prefill, "scales": scales}
    dense = gather_prefill(chunk, kv, **lists, **whole)
    report.check(f"gather_prefill, {name}", distance(dense, paged_prefill_reference(chunk, kv, **whole)), 2 * tolerance)

    by: dict[str, Any] = {"tokens": contexts[-1], "dtype": machine.dtype, "scales": scales}
    gathered = distance(gather_pages(kv, tables[-1], **by), gather_pages_reference(kv, tables[-1], **by))
    report.check(f"gather_pages, {name}", gathered, tolerance)
    check_write(report, machine, name, shape, kind)
    print(f"         dense attention of torch here: {dense_attention(device, machine.dtype, dim, heads // kv_heads)}")


def check_write(report: Report, machine: Machine, name: str, shape: tuple[int, int, int], kind: torch.dtype) -> None:
    (heads, kv_heads, dim), device, tokens = shape, machine.device, 9
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).to(machine.dtype)
    query, key, value = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
    angle = torch.rand(100, dim // 2, device=device) * 6
    places = (torch.randperm(100, device=device)[:tokens], torch.randperm(5 * 64, device=device)[:tokens])
    query_weight, key_weight = (torch.rand(dim, device=device).to(machine.dtype) for _ in range(2))
    norm = HeadNorm(query_weight, key_weight, 1e-6)
    made = []
    for write in (kv_write, kv_write_reference):
        kv = torch.zeros(5, 2, 2, kv_heads, 64, dim, device=device).to(kind)
        quantised = kind.itemsize == 1
        scales = torch.ones(kv.shape[:5], device=device)[:, 1] if quantised else None
        rotation = Rotation(angle.cos(), angle.sin())
        queries = write((query, key, value), places, kv=kv[:, 1], rotation=rotation, norm=norm, scales=scales)
        read = kv[:, 1].float() * (scales[..., None] if scales is not None else 1)
        made.append((queries, read))
    tolerance = TOLERANCE[machine.dtype]
    report.check(f"kv_write, queries, {name}", distance(made[0][0], made[1][0]), tolerance)
    # a quotient half way between two steps may round either way: one step of int8 is 1/127, one of e4m3 1/14
    step = {torch.int8: 0.05, torch.float8_e4m3fn: 0.3}.get(kind, tolerance)
    report.check(f"kv_write, cache, {name}", distance(made[0][1], made[1][1]), step)


def check_rows(report: Report, machine: Machine) -> None:
    device, tolerance = machine.device, TOLERANCE[machine.dtype]
    for width in (1024, 4096, 5120) if machine.is_gpu else (40,):
        hidden, residual = (torch.randn(7, width, device=device).to(machine.dtype) for _ in range(2))
        weight = torch.rand(width, device=device).to(machine.dtype)
        actual = rms_norm(hidden, weight, epsilon=1e-6, residual=residual)
        expected = rms_norm_reference(hidden, weight, epsilon=1e-6, residual=residual)
        error = max(distance(*pair) for pair in zip(actual, expected, strict=True))
        report.check(f"rms_norm, {width}", error, tolerance)
        report.check(f"gate, {width}", distance(gate(hidden), gate_reference(hidden)), tolerance)
    source = torch.randn(6, 3, 64, device=device).to(machine.dtype)
    pairs = torch.tensor([[1, 4], [0, 5]], dtype=torch.int32, device=device)
    copied, truth = source.clone(), source.clone()
    copy_blocks(copied, copied, pairs)
    copy_blocks_reference(truth, truth, pairs)
    report.check("copy_blocks", float((copied != truth).sum()), 0)


def check_sampling(report: Report, machine: Machine) -> None:
    """Counts the rows that draw another token: rounding may decide a tie, in at most one row of a hundred."""
    device, (rows, vocabulary) = machine.device, (128, 151936) if machine.is_gpu else (4, 97)
    logits = (4 * torch.randn(rows, vocabulary, device=device)).to(machine.dtype)
    row = torch.arange(rows, device=device)
    draw = Draw(
        temperature=(row % 3).float(),
        top_k=torch.where(row % 2 == 0, 40, 0).int(),
        top_p=torch.where(row % 4 < 2, 0.9, 1.0),
        min_p=torch.where(row % 5 == 0, 0.05, 0.0),
        seed=row * 7919,
        position=row + 2**33,
        top_logprobs=torch.full_like(row, -1).int(),
    )
    drawn, expected = sample(logits, draw).tokens[0], sample_reference(logits, draw)
    differing = (drawn != expected).float().mean().item()
    report.check("sample", differing, 0.02)
