"""The host's part of a decoding step on a GPU: everything but the device's work.

The whole engine runs with the network of a GPU on memory of the CPU, and instead of computing, a step returns tokens at
once. What remains is planning, laying out, filling and sending the step's buffer, collecting and reporting: the time by
which a step on a GPU is longer if the device has to wait for the host, or what must fit into a step if it does not.

    python benchmarks/host_step.py
    python benchmarks/host_step.py --rows 256 --profile
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import random
import statistics
import time
from typing import Any

# kernels are not called, but their modules refuse tensors of the CPU otherwise
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from shards.collector import spare_what_stays
from shards.engine import Engine, EngineOptions
from shards.gpu.decoder import GpuDecoder
from shards.gpu.graphs import Graphs
from shards.gpu.network import GpuNetwork
from shards.gpu.step import StepOptions
from shards.gpu.weights import random_on
from shards.kernels.logprobs import LOGPROB_WORDS
from shards.kernels.sampling import DrawnRows
from shards.model import Model
from shards.network.config import NetworkConfig, Rope
from shards.nouns import SamplingParams, Submission

CONTEXT, VOCABULARY = 1024, 512


def a_network() -> GpuNetwork:
    """A small network with the tables and positions of a large one."""
    config = NetworkConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        windows=(None,),
        heads=1,
        kv_heads=1,
        head_dim=32,
        max_positions=131_072,
        rope=Rope(),
        rms_norm_eps=1e-6,
        tied_head=True,
        eos_token_ids=frozenset(),
    )
    cpu = torch.device("cpu")
    decoder = GpuDecoder(config, random_on(cpu, config, dtype=torch.bfloat16))
    return GpuNetwork(decoder, options=StepOptions(rows=1024, graph_rows=512))


class Host:
    """An engine that decodes `rows` sequences of `CONTEXT` tokens on a device that takes no time."""

    def __init__(self, rows: int, *, is_sampled: bool, is_adjusted: bool = False) -> None:
        network = a_network()
        blocks = rows * (CONTEXT // 64 + 18)
        options = EngineOptions(kv_blocks=blocks, max_running=rows, max_waiting=rows, step_s=1e3, speculate="off")
        self.engine = Engine(Model("host", network), options)
        self.rows = rows
        steps = network.steps
        logits, drawn = torch.zeros(1024, 1), torch.ones(2, 1024, dtype=torch.int32)
        logprobs = torch.zeros(1024, LOGPROB_WORDS, dtype=torch.int32)
        steps._decoding = Graphs(lambda bucket: logits[:bucket], None)
        steps._compute = lambda fields, *_, **__: logits[: len(fields["target"])]
        steps._plan_decodes = lambda *_: {}
        steps._draws.run = lambda computed, _, **__: DrawnRows(drawn[:, : len(computed)], logprobs[: len(computed)])
        rng = random.Random(rows)
        for key in range(rows):
            chosen: dict[str, Any] = (
                {"temperature": 0.7, "top_p": 0.9, "seed": key} if is_sampled else {"temperature": 0.0}
            )
            if is_adjusted:
                chosen |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "top_logprobs": 5}
            sampling = SamplingParams(**chosen, ignore_eos=True)
            ids = [rng.randrange(VOCABULARY) for _ in range(CONTEXT)]
            self.engine.submit(Submission(key, CONTEXT, 1024, sampling=sampling))
            self.engine.extend(key, np.asarray(ids, dtype="<u4").tobytes())
        while len(self.engine.step().drawn) < rows:
            pass

    def run(self, steps: int) -> list[float]:
        """CPU milliseconds of each of `steps` steps."""
        taken = []
        for _ in range(steps):
            began = time.thread_time()
            assert len(self.engine.step().drawn) == self.rows
            taken.append((time.thread_time() - began) * 1e3)
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--adjusted", action="store_true", help="every row with penalties and log-probabilities")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for rows in asked.rows:
        host = Host(rows, is_sampled=not asked.greedy, is_adjusted=asked.adjusted)
        spare_what_stays()
        host.run(20)
        taken = host.run(asked.steps)
        quantiles = statistics.quantiles(taken, n=10)
        spread = f"10 % to 90 % {quantiles[0]:.2f} to {quantiles[-1]:.2f}"
        print(f"{rows:4} rows: median {statistics.median(taken):.2f} ms, {spread}")
        if asked.profile:
            with cProfile.Profile() as profile:
                host.run(asked.steps)
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
