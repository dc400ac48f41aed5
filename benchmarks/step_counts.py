"""Launches, bytes and operations of a step on a GPU, counted from the code that makes the step; no GPU is used.

The decoder of a GPU runs on memory of the CPU with as many layers as the real model and small matrices. Kernels are
counted and not run; torch's operators are counted if they would launch something, views and allocations are not. Bytes
and operations are those of the real model's shape, with padding. The prediction: memory and matrix units as fast as
`--tb-s` and `--tflops` say, `--gap-us` between two launches of a graph, and `--eager-us` for each launch by the host.

    python benchmarks/step_counts.py
    python benchmarks/step_counts.py --rows 256 --context 1536 --prefill 300
    python benchmarks/step_counts.py --adapters 8
    python benchmarks/step_counts.py --context 9216 --shared 8192
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shards.exec.batch import Batch, Row
from shards.exec.drawing import Drawing
from shards.gpu.adapters import PackedAdapter
from shards.gpu.cache import GpuCache
from shards.gpu.decoder import GpuDecoder
from shards.gpu.graphs import Replay
from shards.gpu.layout import MIXED_TOKENS
from shards.gpu.network import GpuNetwork
from shards.gpu.sharing import sharing_of
from shards.gpu.spans import step_of_batch
from shards.gpu.step import StepOptions, Steps
from shards.gpu.weights import random_on
from shards.kernels.launch import Gpu, Launch
from shards.kernels.paged_decode import SPLIT_TOKENS, most_readers, splits_of
from shards.lora.options import AdapterOptions
from shards.network.config import NetworkConfig, Rope

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 32, 4096, 14336, 32, 8, 128, 128256
"""Llama-3.1-8B, in bfloat16."""

RANK = 16

T = TypeVar("T")

NO_LAUNCH = {
    *("view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "t", "transpose", "unsqueeze", "squeeze"),
    *("expand", "permute", "alias", "detach", "as_strided", "unbind", "_reshape_alias", "lift_fresh"),
    *("flatten", "to", "mT", "narrow", "detach_", "resolve_conj", "resolve_neg"),
    *("empty", "new_empty", "empty_like", "empty_strided", "is_pinned", "_local_scalar_dense"),
}


class Counting(TorchDispatchMode):
    """Counts torch's operators and kernels by name: those that the host launches, and those of a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_host: Counter[str] = Counter()
        self.in_graph: Counter[str] = Counter()
        self.is_replaying = False

    def count(self, name: str) -> None:
        (self.in_graph if self.is_replaying else self.by_host)[name] += 1

    def capture(self, compute: Callable[[], T], /) -> Replay[T]:
        """A graph that computes anew at each replay."""

        def replay() -> T:
            self.count("graph")
            self.is_replaying = True
            computed = compute()
            self.is_replaying = False
            return computed

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name not in NO_LAUNCH:
            self.count(name)
        return func(*args, **(kwargs or {}))


def some_steps(
    rows: int, blocks: int, counting: Counting, *, graph_tokens: int, adapters: int = 0
) -> tuple[Steps, list[PackedAdapter]]:
    """Llama-3.1-8B with small matrices and a small vocabulary, and so many adapters."""
    config = NetworkConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        windows=(None,) * LAYERS,
        heads=4,
        kv_heads=1,
        head_dim=16,
        max_positions=131_072,
        rope=Rope(),
        rms_norm_eps=1e-5,
    )
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    options = StepOptions(rows=max(1024, rows), graph_rows=512, graph_tokens=graph_tokens)
    decoder = GpuDecoder(config, random_on(cpu, config, dtype=dtype))
    loaded = []
    if adapters:
        GpuNetwork(decoder).adapt(AdapterOptions(most=adapters))
        assert decoder.slots is not None
        layout = decoder.slots.layout
        numbers, ranks = torch.zeros(layout.numbers, dtype=dtype), torch.zeros(layout.parts, dtype=torch.int32)
        loaded = [PackedAdapter(str(number), str(number), numbers, ranks) for number in range(adapters)]
        # loaded before a step is counted
        decoder.slots.of_tokens([Row(number, 1, 1, (0,), each) for number, each in enumerate(loaded)], adapters)
    cache = GpuCache(config, blocks, dtype=dtype, device=cpu)
    steps = Steps(decoder, cache, options, capture=counting.capture)
    steps.warm_up([rows], adapts=bool(adapters))
    steps.warm_up_mixed(rows + 1)
    return steps, loaded


def a_batch(rows: int, context: int, prefill: int, adapters: Sequence[PackedAdapter] = (), *, shared: int = 0) -> Batch:
    """`rows` sequences with one new token behind `context`, of which `shared` tokens are the same for all, and one
    chunk of `prefill` tokens; adapters in turns.
    """
    common, own = shared // 64, -(-(context - shared) // 64)
    behind = common + rows * own
    parts = [(1, context, (*range(common), *range(at, at + own))) for at in range(common, behind, own)]
    if prefill:
        parts.append((prefill, prefill, tuple(range(behind, behind - (-prefill // 64)))))
    starts = np.cumsum([0, *(tokens for tokens, _, _ in parts)])
    chosen = itertools.cycle(adapters or [None])
    listed = tuple(Row(int(start), *part, adapter) for start, part, adapter in zip(starts, parts, chosen, strict=False))
    positions = [np.arange(row.context_tokens - row.tokens, row.context_tokens) for row in listed]
    slots = [np.array(row.blocks)[at // 64] * 64 + at % 64 for row, at in zip(listed, positions, strict=True)]
    wanted = torch.tensor([row.start + row.tokens - 1 for row in listed])
    at, slot = (torch.from_numpy(np.concatenate(numbers)) for numbers in (positions, slots))
    return Batch(torch.zeros(len(at), dtype=torch.int64), at, slot, listed, wanted)


def kv_tokens(batch: Batch) -> tuple[int, int, int]:
    """The tokens of KV that decoding rows see, those that the kernel reads for it, and the different ones of these."""
    rows = [row for row in batch.rows if row.tokens == 1]
    tables = np.array([row.blocks for row in rows], dtype=np.int32)
    sharing, readers = sharing_of(rows, tables, split_pages=SPLIT_TOKENS // 64), most_readers(HEADS // KV_HEADS)
    alone = sum(row.context_tokens for row in rows)
    own = alone - SPLIT_TOKENS * sum(sharing.own)
    spans = [(SPLIT_TOKENS * (span.end - span.first), span.rows) for span in sharing.spans]
    read = own + sum(tokens * -(-count // readers) for tokens, count in spans)
    return alone, read, own + sum(tokens for tokens, _ in spans)


def count(steps: Steps, batch: Batch, counting: Counting) -> None:
    """Count the launches of the step that computes `batch`, with sampling, and no others."""
    drawings = (Drawing(0.7, 0, 0.9, 0.0, 1, 0),) * len(batch.logit_rows)
    step = replace(step_of_batch(batch, unread=steps.unread), drawings=drawings)
    counting.by_host.clear()
    counting.in_graph.clear()
    steps.collect(steps.submit(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1536, help="mean context of a decoding row")
    parser.add_argument("--shared", type=int, default=0, help="tokens with which all contexts begin")
    parser.add_argument("--prefill", type=int, default=300, help="prompt tokens of the mixed step")
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters of rank 16 among the rows")
    parser.add_argument("--tb-s", type=float, default=4.8, help="memory bandwidth; 4.8 is an H200's")
    parser.add_argument("--tflops", type=float, default=989.0, help="bfloat16 operations; 989 are an H200's")
    parser.add_argument("--graph-tokens", type=int, default=512, help="most tokens of a mixed step with a graph")
    parser.add_argument("--gap-us", type=float, default=1.5)
    parser.add_argument("--eager-us", type=float, default=6.0)
    asked = parser.parse_args()
    per_layer = HIDDEN * (HEADS + 2 * KV_HEADS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * INNER
    weights = LAYERS * per_layer + HIDDEN * VOCABULARY
    # queries, keys and values; output; gates and inputs; output of the MLP; and the head
    sides = (3 * HIDDEN + (HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM + HIDDEN, 2 * (HIDDEN + INNER), INNER + HIDDEN)
    low_rank = RANK * (LAYERS * sum(sides) + HIDDEN + VOCABULARY)
    kv_bytes = 2 * 2 * LAYERS * KV_HEADS * DIM
    for title, prefill, graph_tokens in (
        ("decode", 0, 0),
        ("mixed, without graphs", asked.prefill, 0),
        ("mixed, as a graph", asked.prefill, asked.graph_tokens),
    ):
        counting = Counting()

        def start(_: Gpu, launch: Launch, counting: Counting = counting) -> None:
            counting.count(f"triton {launch.kernel.__name__}")

        with mock.patch.object(Gpu, "start", start), counting:
            shape = (asked.rows, asked.context, prefill)
            blocks = 1 + max(max(row.blocks) for row in a_batch(*shape, shared=asked.shared).rows)
            steps, adapters = some_steps(
                asked.rows, blocks, counting, graph_tokens=graph_tokens, adapters=asked.adapters
            )
            batch = a_batch(*shape, adapters, shared=asked.shared)
            count(steps, batch, counting)
        alone, kv_read, different = kv_tokens(batch)
        # written by one kernel and read by another
        results = 2 * LAYERS * 4 * HEADS * (DIM + 1) * splits_of([asked.context] * asked.rows)
        tokens = asked.rows + prefill
        # steps with chunks and adapters have no graph
        if graph_tokens and not adapters:
            tokens = -(-tokens // MIXED_TOKENS) * MIXED_TOKENS
        read = 2 * (weights + asked.adapters * low_rank) + kv_bytes * (kv_read + prefill)
        products = 2 * (LAYERS * per_layer + bool(adapters) * low_rank) * tokens + 2 * HIDDEN * VOCABULARY * (
            asked.rows + bool(prefill)
        )
        scores = 4 * LAYERS * HEADS * DIM * (asked.rows * asked.context + prefill * prefill // 2)
        floor_ms = max(read / asked.tb_s / 1e9, (products + scores) / asked.tflops / 1e9)
        by_host, in_graph = counting.by_host.total(), counting.in_graph.total()
        predicted_ms = floor_ms + (by_host * asked.eager_us + in_graph * asked.gap_us) / 1e3
        print(f"{title}: {asked.rows} rows at {asked.context}, {prefill} prompt tokens, {tokens} tokens with padding")
        print(f"  {by_host} launches by the host, {in_graph} in a graph")
        print(
            f"  KV: {kv_bytes * alone / 1e9:.1f} GB as the rows see it, {kv_bytes * kv_read / 1e9:.1f} read, "
            f"{kv_bytes * different / 1e9:.1f} different; results of splits {results / 1e9:.1f} GB"
        )
        print(f"  {read / 1e9:.1f} GB, {(products + scores) / 1e12:.2f} T operations")
        print(
            f"  floor {floor_ms:.2f} ms, predicted {predicted_ms:.2f} ms, {floor_ms / predicted_ms:.0%} of the roofline"
        )
        for launches in (counting.by_host, counting.in_graph):
            print("  " + ", ".join(f"{count} {name}" for name, count in launches.most_common()))


if __name__ == "__main__":
    main()
