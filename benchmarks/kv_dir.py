"""Prompts restored from disk by an engine that was started again, against computing them.

Random weights of the shape of Qwen3-0.6B, or with `--model small` of a small network, which computes 200,000 tokens on
a CPU within minutes. For each length, one engine computes a prompt and stops in an orderly way; a second engine on the
same directory gets the same prompt with another last token. Prints both times to the first token, predicted and
measured, the cached tokens, and the crossover: the rate at which reading takes as long as computing.
Files were just written, so they come from the page cache, as after a restart of the process. `--rates` slows reading
down to shares of the predicted crossover, and prints what the engine chose for the longest prompt.

    python -m benchmarks.kv_dir --tokens 512 1024 --rates 0.5 2
    python -m benchmarks.kv_dir --model small --tokens 200000
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from benchmarks.gpu_parts.models import QWEN3_06B
from shards.engine import Engine, EngineOptions
from shards.exec.network import Network
from shards.gpu.device import choose_device
from shards.kv.block_files import BlockFiles
from shards.kv.disk_jobs import DiskThreads, DiskWorker
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.raw_block import BlockLabel
from shards.model import Model, PagedNetwork
from shards.network.config import NetworkConfig
from shards.network.decoder import Decoder
from shards.network.loading import random_weights
from shards.nouns import FinishReason, SamplingParams, Submission
from shards.sched.cost import prefill_shape
from shards.threads import default_threads, use_threads
from shards.warmup import warm_up

MIB = 2**20
SMALL = replace(
    QWEN3_06B,
    hidden_size=128,
    intermediate_size=256,
    heads=2,
    kv_heads=1,
    head_dim=64,
    max_positions=262_144,
    windows=(None,) * 2,
)
MODELS = {"qwen3-0.6b": QWEN3_06B, "small": SMALL}


class SlowFiles:
    """`files` of which each block takes at least `block_s` to read."""

    def __init__(self, files: BlockFiles, block_s: float) -> None:
        self._files, self._block_s = files, block_s

    def read(self, label: BlockLabel, pieces: Sequence[memoryview]) -> None:
        """Read the block of `label`, no faster than that."""
        started = time.perf_counter()
        self._files.read(label, pieces)
        time.sleep(max(0.0, self._block_s - (time.perf_counter() - started)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._files, name)


class Run(NamedTuple):
    """One prompt: seconds to its first token, as predicted and as measured, and its cached tokens."""

    predicted_s: float
    ttft_s: float
    cached_tokens: int


def a_network(config: NetworkConfig, device: str) -> Network:
    """The network of `config` with random weights."""
    on, dtype = choose_device(device), torch.bfloat16
    loaded = random_weights(config, seed=0, dtype=dtype)
    if on.type == "cuda":
        from shards.gpu.network import GpuNetwork
        from shards.gpu.weights import moved

        return GpuNetwork.of(config, moved(loaded, config, device=on, dtype=dtype))
    return PagedNetwork(Decoder(config, loaded), kv_dtype=dtype)


def slowed(files: BlockFiles, clock: Callable[[], float], *, block_s: float) -> DiskWorker:
    """One reading thread that takes `block_s` for each block."""
    return DiskThreads(SlowFiles(files, block_s), clock, readers=1)  # type: ignore[arg-type]


def an_engine(network: Network, folder: Path, blocks: int, block_s: float = 0.0) -> Engine:
    """An engine that has been warmed up, on the directory `folder`."""
    model = Model("random", network, weights="random, seed 0", dtype="bfloat16")
    window = blocks * BLOCK_TOKENS
    options = EngineOptions(
        kv_blocks=blocks, kv_dir=folder, kv_dir_bytes=32 * 2**30, max_running=2, window_tokens=window
    )
    engine = Engine(model, options, worker_of=partial(slowed, block_s=block_s) if block_s else DiskThreads)
    warm_up(engine)
    return engine


def ask(engine: Engine, prompt: list[int], *, is_stored: bool) -> Run:
    """Send `prompt`, of which all whole blocks are on disk if it `is_stored`, and wait for its first token."""
    disk, scheduler = engine._pool.disk, engine._scheduler
    data = np.array(prompt, dtype="<u4").tobytes()
    blocks = (len(prompt) - 1) // BLOCK_TOKENS if is_stored else 0
    rest = len(prompt) - blocks * BLOCK_TOKENS
    predicted_s = blocks * disk._time.block_s + scheduler.cost.predict_s(prefill_shape(blocks * BLOCK_TOKENS, rest))
    started = time.perf_counter()
    engine.submit(Submission("it", len(prompt), 1, sampling=SamplingParams(ignore_eos=True)))
    engine.extend("it", data)
    while not (report := engine.step()).finished:
        pass
    assert report.finished[0].reason is FinishReason.LENGTH, report.finished[0].message
    return Run(predicted_s, time.perf_counter() - started, report.finished[0].cached_tokens)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="of the crossover's rate")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    use_threads(default_threads())
    rng, network = random.Random(0), a_network(MODELS[arguments.model], arguments.device)
    blocks = max(arguments.tokens) // BLOCK_TOKENS + 16
    print(f"a block of {BLOCK_TOKENS} tokens takes {network.block_bytes / MIB:.1f} MiB")
    print("tokens   computed: predicted  measured   from disk: predicted  measured  cached   stored in")
    with tempfile.TemporaryDirectory() as folder:
        crossover = 0.0
        for tokens in arguments.tokens:
            cold, warm, stored_s = list[Run](), list[Run](), list[float]()
            for _ in range(arguments.rounds):
                prompt = [rng.randrange(1000, 100_000) for _ in range(tokens)]
                engine = an_engine(network, Path(folder), blocks)
                cold.append(ask(engine, prompt, is_stored=False))
                started = time.perf_counter()
                engine.preserve(600.0)
                stored_s.append(time.perf_counter() - started)
                engine.close()
                engine = an_engine(network, Path(folder), blocks)
                warm.append(ask(engine, [*prompt[:-1], 7], is_stored=True))
                engine.close()
            computed, restored = (median_of(runs) for runs in (cold, warm))
            print(
                f"{tokens:6}   {computed.predicted_s:17.3f} s {computed.ttft_s:7.3f} s   "
                f"{restored.predicted_s:18.3f} s {restored.ttft_s:7.3f} s {restored.cached_tokens:6} "
                f"{statistics.median(stored_s):8.3f} s"
            )
            predicted, measured = (
                network.block_bytes / MIB * tokens / BLOCK_TOKENS / seconds
                for seconds in (computed.predicted_s, computed.ttft_s)
            )
            crossover = predicted
            print(f"         crossover: {predicted:.0f} MiB/s predicted, {measured:.0f} MiB/s measured")
        for share in arguments.rates:
            engine = an_engine(network, Path(folder), blocks, network.block_bytes / MIB / (share * crossover))
            run = ask(engine, [*prompt[:-1], 8], is_stored=True)
            print(
                f"  at {share * crossover:8.1f} MiB/s: first token after {run.ttft_s:.3f} s, {run.cached_tokens} cached"
            )
            engine.close()


def median_of(runs: list[Run]) -> Run:
    """The run with the median time to its first token."""
    return sorted(runs, key=lambda run: run.ttft_s)[len(runs) // 2]


if __name__ == "__main__":
    main()
