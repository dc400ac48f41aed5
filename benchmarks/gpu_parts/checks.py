"""Checks that all ways to compute the same give the same: graphs, running ahead, neighbours, and the CPU's decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.clients import Clients, Job
from benchmarks.gpu_parts.drive import a_network, answers, some_prompts, some_weights
from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.models import TOY, Sizes
from benchmarks.gpu_parts.report import Report
from shards.engine import Engine, EngineOptions
from shards.exec.batch import Batch, Row
from shards.exec.drawing import Drawing
from shards.gpu.network import GpuNetwork
from shards.gpu.step import StepOptions
from shards.gpu.weights import moved
from shards.kv.cache import KvCache
from shards.kv.table import blocks_for
from shards.model import Model
from shards.network.config import NetworkConfig
from shards.network.decoder import Decoder
from shards.network.loading import random_weights
from shards.nouns import SamplingParams


def check_steps(report: Report, machine: Machine, _: Sizes, name: str, config: NetworkConfig) -> None:
    """The share of tokens that differ between two runs; it must be 0."""
    rows, new, lengths = (24, 48, (70, 7, 300, 513)) if machine.is_gpu else (1, 3, (3,))
    prompts = some_prompts(config, [lengths[row % len(lengths)] + row for row in range(rows)])
    weights = some_weights(machine, config)
    blocks = sum(-(-(len(prompt) + new) // 64) for prompt in prompts)
    runs: dict[str, list[list[int | None]]] = {}
    warm = Drawing(temperature=1.0, top_p=0.95, seed=3)
    for graphs in (False, True):
        options = StepOptions(rows=max(8, rows), graphs=graphs)
        network = a_network(config, weights, blocks=blocks, options=options)
        for ahead in (0, 1):
            # a dry run has no graphs to compare
            if machine.is_gpu or not graphs:
                runs[f"greedy, graphs {graphs}, {ahead} ahead"] = answers(network, prompts, new, ahead=ahead)
        runs[f"drawn, graphs {graphs}"] = answers(network, prompts, new, ahead=int(graphs), drawing=warm)
        print(f"         {network.steps!r}")
    for kind in ("greedy", "drawn"):
        first, *others = [(key, value) for key, value in runs.items() if key.startswith(kind)]
        for key, value in others:
            report.check(f"{name}: {key} = {first[0]}", share_differing(value, first[1]), 0)
    unsound = sum(token is None for run in runs.values() for row in run for token in row)
    report.check(f"{name}: logits that are not finite", unsound, 0)


def check_engine(report: Report, machine: Machine, _: Sizes, name: str, config: NetworkConfig) -> None:
    """The same through the engine's own loop: graphs on and off, running ahead on and off, alone and beside others.

    Its plans do not depend on time here, so every step has the same shape in each run, and the same bits.
    """
    rows, new, lengths = (24, 48, (70, 7, 300, 513)) if machine.is_gpu else (2, 2, (2,))
    prompts = some_prompts(config, [lengths[row % len(lengths)] + row for row in range(rows)], seed=1)
    weights = some_weights(machine, config)
    options = EngineOptions(
        kv_blocks=sum(blocks_for(len(prompt) + new) for prompt in prompts), max_running=rows, step_s=1e6
    )

    def answers_to(prompts: Sequence[Sequence[int]], *, graphs: bool = True, **changes: Any) -> list[list[int | None]]:
        network = GpuNetwork.of(config, weights, options=StepOptions(rows=max(8, rows), graphs=graphs))
        engine = Engine(Model(name, network), replace(options, **changes))
        network.steps.cache.data.zero_()
        # rows of all kinds together: greedy, drawn by chance, and a few tokens with all that changes logits
        kinds = (
            SamplingParams(ignore_eos=True),
            SamplingParams(ignore_eos=True, temperature=1.0, top_p=0.95, seed=3),
            SamplingParams(
                ignore_eos=True,
                temperature=1.0,
                top_logprobs=1,
                repetition_penalty=1.1,
                presence_penalty=0.5,
                logit_bias={7: 1.5},
                seed=4,
            ),
        )
        jobs = [
            Job(np.asarray(prompt, dtype="<u4"), 1 + new // 4 if row % 3 == 2 else new - row % 2, kinds[row % 3])
            for row, prompt in enumerate(prompts)
        ]
        Clients(engine).run(jobs, rows)
        return [job.answer for job in jobs]

    first = answers_to(prompts, run_ahead="off")
    for graphs in (True, False) if machine.is_gpu else (True,):
        for run_ahead in ("off", "on"):
            answers = answers_to(prompts, graphs=graphs, run_ahead=run_ahead)
            label = f"{name}: engine, graphs {graphs}, run_ahead {run_ahead}"
            report.check(label, share_differing(answers, first), 0)
    together = answers_to(prompts[:6], deterministic=True)
    alone = answers_to(prompts[:1], deterministic=True, graphs=False)
    report.check(f"{name}: deterministic engine, alone = beside others", share_differing(alone, together[:1]), 0)


def share_differing(some: list[list[int | None]], others: list[list[int | None]]) -> float:
    pairs = [pair for answer, other in zip(some, others, strict=True) for pair in zip(answer, other, strict=True)]
    return sum(token != other for token, other in pairs) / len(pairs)


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"query_key_norm": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "Mistral": {"query_key_norm": False, "windows": (50,), "tied_head": False},
    "Qwen2": {"query_key_norm": False, "qkv_bias": True, "windows": (None, 40)},
    "Qwen3": {"windows": (None, None)},
}


def check_families(report: Report, machine: Machine) -> None:
    """Logits of a small network of each family against the CPU's decoder, both in float32."""
    for family, changes in FAMILIES.items():
        config = replace(TOY, head_dim=32, **changes)
        weights = random_weights(config, seed=1)
        network = GpuNetwork.of(config, moved(weights, config, device=machine.device, dtype=torch.float32))
        network.allocate(8)
        chunks = (65, 1, 84) if machine.is_gpu else (3, 1, 2)
        prompt = some_prompts(config, [sum(chunks)])[0]
        on_cpu, cache, worst, done = Decoder(config, weights), KvCache(config, 8), 0.0, 0
        for tokens in chunks:
            batch = a_batch(prompt[done : done + tokens], done)
            difference = network.forward(batch).cpu() - on_cpu.forward(batch, cache)
            worst, done = max(worst, difference.abs().max().item()), done + tokens
        report.check(f"{family}: logits of the CPU's decoder", worst, 1e-3)


def a_batch(new: list[int], computed: int) -> Batch:
    positions = torch.arange(computed, computed + len(new))
    blocks = torch.tensor([5, 2, 7])
    slots = blocks[positions // 64] * 64 + positions % 64
    row = Row(0, len(new), computed + len(new), (5, 2, 7))
    return Batch(torch.tensor(new), positions, slots, (row,), torch.tensor([len(new) - 1]))
