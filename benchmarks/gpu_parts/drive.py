"""Drives steps without an engine: prompts in, greedy or seeded answers out, with or without running ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from benchmarks.gpu_parts.machine import Machine
from shards.exec.drawing import Drawing
from shards.gpu.network import GpuNetwork
from shards.gpu.spans import Span, step_of_spans
from shards.gpu.step import StepOptions
from shards.gpu.transfers import Ticket
from shards.gpu.weights import GpuWeights, random_on
from shards.network.config import NetworkConfig


def a_network(
    config: NetworkConfig, weights: GpuWeights, *, blocks: int, options: StepOptions | None = None
) -> GpuNetwork:
    return with_memory(GpuNetwork.of(config, weights, options=options), blocks)


def with_memory(network: GpuNetwork, blocks: int) -> GpuNetwork:
    network.allocate(blocks)
    # zeros: the previous contents of this memory may not be numbers
    network.steps.cache.data.zero_()
    return network


def blocks_in_room(machine: Machine, network: GpuNetwork, *, batch_tokens: int, rows: int) -> int | None:
    """The KV blocks that fit beside the weights and a step; None for any number, as at the sizes of a dry run."""
    if not machine.is_gpu:
        return None
    return network.room_bytes(batch_tokens=batch_tokens, rows=rows) // network.block_bytes


def some_weights(machine: Machine, config: NetworkConfig) -> GpuWeights:
    with torch.no_grad():
        return random_on(machine.device, config, dtype=machine.dtype)


def some_prompts(config: NetworkConfig, lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def answers(
    network: GpuNetwork,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    ahead: int,
    drawing: Drawing | None = None,
    batch_tokens: int = 8192,
) -> list[list[int | None]]:
    """The tokens drawn after `prompts`: whole prompts in each step up to `batch_tokens`, then all rows together.

    `ahead` 1 submits each step before the previous one is collected.
    """
    steps, first_block, tables = network.steps, 0, []
    for prompt in prompts:
        pages = -(-(len(prompt) + new_tokens) // 64)
        tables.append(list(range(first_block, first_block := first_block + pages)))
    drawn: list[list[int | None]] = [[] for _ in prompts]

    def how(row: int, position: int) -> Drawing:
        chosen = drawing or Drawing()
        return chosen._replace(seed=chosen.seed + row, position=position)

    starting: list[int] = []
    for row, prompt in enumerate(prompts):
        starting.append(row)
        if row + 1 == len(prompts) or sum(len(prompts[number]) for number in starting) + len(prompt) > batch_tokens:
            spans = [
                Span(number, prompts[number], 0, tables[number], how(number, len(prompts[number])))
                for number in starting
            ]
            for number, sample in zip(starting, steps.collect(steps.submit(step_of_spans(spans))), strict=True):
                drawn[number].append(sample and sample.token_id)
            starting = []

    due: deque[Ticket] = deque()

    def collect() -> None:
        for row, sample in enumerate(steps.collect(due.popleft())):
            drawn[row].append(sample and sample.token_id)

    for number in range(1, new_tokens):
        spans = []
        for row, prompt in enumerate(prompts):
            computed = len(prompt) + number - 1
            known = None if ahead else [drawn[row][-1] or 0]
            spans.append(Span(row, known, computed, tables[row], how(row, computed + 1)))
        due.append(steps.submit(step_of_spans(spans)))
        if len(due) > ahead:
            collect()
    while due:
        collect()
    return drawn
