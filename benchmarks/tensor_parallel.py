"""One network in two parts: its errors, its messages and its speed on CPUs.

    python -m benchmarks.tensor_parallel            # errors of every family, in float32: a table for docs/models.md
    python -m benchmarks.tensor_parallel --speed    # the bundled model, in one process and in two

Errors are the largest differences of logits, which spread over several units, between two parts (on threads, joined by
gloo) and one process: a chunk of 130 tokens, then single tokens. Speed is the clock's: both forms answer the same
requests in turns, with one thread in each process, and medians count. `orders` are the bytes that a decoding step sends
to each other process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from shards.bundled import weights
from shards.engine import Engine, EngineOptions
from shards.kv.cache import KvCache
from shards.model import Model
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.group import ALONE, Group
from shards.network.loading import load_weights
from shards.nouns import SamplingParams, Submission
from shards.parallel.cut import PartBuilder
from shards.parallel.part import Part
from shards.parallel.processes import PartProcesses, leading
from shards.threads import use_threads
from tests.shards.parallel.threads import on_all
from tests.shards.tiny_checkpoints import KINDS, a_batch, save_checkpoint, some_tokens

PROMPT, CHUNK = 140, 130
BLOCKS = (5, 1, 3)


def logits(folder: Path, group: Group, *, whole_experts: bool = True) -> Tensor:
    """Logits of the prompt, computed by this part and the others."""
    config, tokens = read_config(folder), some_tokens(PROMPT)
    share = Part(group.rank, group.size, whole_experts)
    part = config if group.size == 1 else share.config(config)
    build = (lambda builder: builder) if group.size == 1 else partial(PartBuilder.of, group=group, part=share)
    decoder, cache = Decoder(part, load_weights(folder, config, builder_of=build), group), KvCache(part, 8)
    steps = [(tokens[:CHUNK], 0), *((tokens[at : at + 1], at) for at in range(CHUNK, PROMPT))]
    return torch.cat([decoder.forward(a_batch((new, at, BLOCKS)), cache).cpu() for new, at in steps])


def errors() -> None:
    """Print the table of errors."""
    print("| checkpoint | two parts | with a slice of each expert |")
    print("|---|---|---|")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_checkpoint(folder, kind)
            whole = logits(folder, ALONE)
            forms = (True, False) if read_config(folder).experts is not None else (True,)
            parts = [on_all(2, partial(logits, folder, whole_experts=form))[0] for form in forms]
        errors = [f"{(part - whole).abs().max().item():.0e}" for part in parts]
        print(f"| {kind} | {' | '.join([*errors, ''][:2])} |", flush=True)


def seconds(model: Model, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until all answers are complete."""
    engine = Engine(model, EngineOptions(kv_bytes=2**28, speculate="off"))
    started_s = time.perf_counter()
    for key, prompt in enumerate(prompts):
        engine.submit(Submission(key, len(prompt), tokens, sampling=SamplingParams(ignore_eos=True)))
        engine.extend(key, torch.tensor(prompt, dtype=torch.int32).numpy().tobytes())
    while engine.has_work:
        engine.step()
    elapsed_s = time.perf_counter() - started_s
    engine.close()
    return elapsed_s


def speed(rounds: int, tokens: int) -> None:
    """Print the times of both forms."""
    use_threads(1)
    path = weights()
    processes = PartProcesses(str(path), size=2, dtype="auto", kv_dtype="auto", device="cpu", threads=1)
    alone, part = Model.load(path), Model.load(path, group=processes.group)
    processes.await_loaded(part.files)
    together = leading(part, processes)
    sent: list[int] = []
    send = processes.followers._links[0].send
    processes.followers._links[0].send = lambda message: (sent.append(len(message)), send(message))[1]  # type: ignore[method-assign, func-returns-value]
    try:
        for rows in (1, 8, 32):
            prompts = [some_tokens(200, seed=row) for row in range(rows)]
            one, two = [], []
            for _ in range(rounds):
                one.append(seconds(alone, prompts, tokens))
                sent.clear()
                two.append(seconds(together, prompts, tokens))
            ratio = statistics.median(a / b for a, b in zip(one, two, strict=True))
            print(
                f"{rows} rows: {statistics.median(one):.2f} s in one process, {statistics.median(two):.2f} s in two "
                f"({ratio:.2f} times as fast), orders {statistics.median(sent[-10:])} bytes"
            )
    finally:
        processes.close()


def main() -> None:
    """Print what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    asked = parser.parse_args()
    if asked.speed:
        speed(asked.rounds, asked.tokens)
    else:
        errors()


if __name__ == "__main__":
    main()
