"""Draws from logits, alone: the price of top-k and top-p, beside reading the logits once."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu_parts.machine import Machine, replayed, seconds
from benchmarks.gpu_parts.models import Sizes
from benchmarks.gpu_parts.report import Report
from shards.kernels.draw import Draw
from shards.kernels.sampling import sample
from shards.kernels.threshold import threshold, threshold_reference
from shards.network.config import NetworkConfig

SPREADS = {"flat": 1.0, "steep": 6.0}
"""Standard deviations of normal logits. 0.95 of the mass have about 95,000 of 128,256 tokens with 1, 20 to 70 with 6.
"""

WAYS = {"nothing": (0, 1.0), "top-k 20": (20, 1.0), "top-p 0.95": (0, 0.95), "both": (20, 0.95)}


def thresholds_and_draws(report: Report, machine: Machine, sizes: Sizes, name: str, config: NetworkConfig) -> None:
    """Milliseconds of the threshold and of the whole draw, as graphs."""
    vocabulary = config.vocab_size
    for spread, deviation in SPREADS.items():
        for rows in sizes.sampled:
            torch.manual_seed(rows)
            logits = (deviation * torch.randn(rows, vocabulary, device=machine.device)).to(machine.dtype)
            floor = 1e3 * logits.nbytes / machine.copy_gb_s / 1e9
            for way, (top_k, top_p) in WAYS.items():
                draw = _a_draw(rows, top_k, top_p, machine.device)
                label = f"{name}, {rows} x {vocabulary}, {spread}, {way}"
                if draw.truncated:
                    work = partial(_measure_threshold, report, machine, logits, draw, floor, f"threshold, {label}")
                    report.attempt(f"threshold, {label}", work, needs_s=4)
                work = partial(_measure_draw, report, machine, logits, draw, floor, f"draw, {label}")
                report.attempt(f"draw, {label}", work, needs_s=4)


def _measure_threshold(
    report: Report, machine: Machine, logits: torch.Tensor, draw: Draw, floor: float, label: str
) -> None:
    found, expected = (each(logits, draw)[:, None] for each in (threshold, threshold_reference))
    differing = ((logits.float() >= found) != (logits.float() >= expected)).any(dim=1).float().mean().item()
    # rounding may decide whether the last token of top-p is left
    report.check(label, differing, 0.02)
    spent = 1e3 * seconds(replayed(partial(threshold, logits, draw), machine.device), machine.device)
    report.add("sampler", label, spent, floor=floor, unit="ms", note="floor: the logits once")


def _measure_draw(report: Report, machine: Machine, logits: torch.Tensor, draw: Draw, floor: float, label: str) -> None:
    spent = 1e3 * seconds(replayed(partial(sample, logits, draw), machine.device), machine.device)
    report.add("sampler", label, spent, floor=floor, unit="ms", note="floor: the logits once")


def _a_draw(rows: int, top_k: int, top_p: float, device: torch.device) -> Draw:
    full = partial(torch.full, (rows,), device=device)
    return Draw(
        temperature=full(1.0),
        top_k=full(top_k, dtype=torch.int32),
        top_p=full(top_p),
        min_p=full(0.0),
        seed=torch.arange(rows, device=device),
        position=torch.arange(rows, device=device),
        top_logprobs=full(-1, dtype=torch.int32),
        truncated=top_k > 0 or top_p < 1,
    )
