"""The cost of LoRA adapters in a step on a CPU, against the same step without them.

Random weights of the shape of Qwen3-0.6B with `--layers` layers, and adapters of `--rank` on all projections. Steps of
1, 8 and 32 decoding rows behind 256 tokens, and of a prompt of 512 tokens: without adapters configured, with them
configured and none in use, with one adapter for all rows, and with eight adapters side by side. Prints medians of CPU
seconds over alternating rounds, as factors of the step without adapters.

    python -m benchmarks.adapters --layers 8 --rounds 15
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.gpu_parts.models import QWEN3_06B
from shards.exec.batch import Batch, Row
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.table import blocks_for
from shards.lora.adapter import Adapter, LowRank, Update
from shards.lora.options import AdapterOptions
from shards.lora.sites import sites_of
from shards.model import PagedNetwork
from shards.network.config import NetworkConfig
from shards.network.decoder import Decoder
from shards.network.layers import Weights
from shards.network.loading import random_weights
from shards.threads import use_threads

ADAPTERS, CONTEXT = 8, 256


def an_adapter(config: NetworkConfig, rank: int, dtype: torch.dtype, number: int) -> Adapter:
    """A random adapter of all projections."""
    generator = torch.Generator().manual_seed(number)
    changes = {}
    for site in sites_of(config):
        if site.name == "lm_head":
            continue
        down = torch.randn(rank * len(site.parts), site.inputs, generator=generator).to(dtype)
        updates = tuple(
            Update(
                part.start,
                part.stop,
                slice(at * rank, (at + 1) * rank),
                torch.randn(part.stop - part.start, rank, generator=generator).to(dtype),
            )
            for at, part in enumerate(site.parts)
        )
        changes[site.name] = LowRank(down, updates)
    return Adapter(f"a{number}", str(number), changes)


def a_batch(rows: int, tokens: int, adapters: Sequence[Adapter]) -> Batch:
    """`rows` sequences with `tokens` new tokens each, behind CONTEXT others if it is one."""
    before = CONTEXT if tokens == 1 else 0
    blocks = blocks_for(before + tokens)
    positions = torch.arange(before, before + tokens)
    made, slots = [], []
    for row in range(rows):
        held = range(row * blocks, (row + 1) * blocks)
        adapter = adapters[row % len(adapters)] if adapters else None
        made.append(Row(row * tokens, tokens, before + tokens, tuple(held), adapter))
        slots.append(torch.tensor(held)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS)
    wanted = torch.tensor([(row + 1) * tokens - 1 for row in range(rows)])
    return Batch(torch.full((rows * tokens,), 7), positions.repeat(rows), torch.cat(slots), tuple(made), wanted)


def a_network(config: NetworkConfig, weights: Weights, *, adapts: bool) -> PagedNetwork:
    network = PagedNetwork(Decoder(config, weights), kv_dtype=weights.dtype)
    if adapts:
        network.adapt(AdapterOptions())
    network.allocate(32 * blocks_for(CONTEXT + 1))
    # memory that was never written may hold NaN
    network._allocated.data.zero_()
    return network


def cpu_s(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    use_threads(1)
    dtype = getattr(torch, options.dtype)
    config = replace(QWEN3_06B, windows=(None,) * options.layers)
    weights = random_weights(config, 1, dtype=dtype)
    adapters = [an_adapter(config, options.rank, dtype, number) for number in range(ADAPTERS)]
    plain, adapting = (a_network(config, weights, adapts=adapts) for adapts in (False, True))
    print(
        f"{options.layers} layers, rank {options.rank}, {options.dtype}, "
        f"{adapters[0].nbytes / 2**20:.1f} MiB an adapter"
    )
    print(f"{'step':<24}{'CPU ms':>9}{'unused':>9}{'one':>9}{'eight':>9}")
    for name, rows, tokens in (("1 row", 1, 1), ("8 rows", 8, 1), ("32 rows", 32, 1), ("a prompt of 512", 1, 512)):
        cases = [
            (plain, a_batch(rows, tokens, [])),
            (adapting, a_batch(rows, tokens, [])),
            (adapting, a_batch(rows, tokens, adapters[:1])),
            *([(adapting, a_batch(rows, tokens, adapters))] if rows >= ADAPTERS else []),
        ]
        taken: list[list[float]] = [[] for _ in cases]
        for _ in range(options.rounds):
            for (network, batch), times in zip(cases, taken, strict=True):
                times.append(cpu_s(lambda network=network, batch=batch: network.forward(batch)))  # type: ignore[misc]
        base, *others = map(statistics.median, taken)
        print(f"{name:<24}{1000 * base:>9.1f}" + "".join(f"{other / base:>8.2f}x" for other in others), flush=True)


if __name__ == "__main__":
    main()
