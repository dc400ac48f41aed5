"""Prompt lookup on a CPU: the engine with `speculate` auto against off, same weights, same requests, same process.

Prints for each workload how many times as fast auto answers, in tokens per second of CPU time from the first submission
to the last token of the last answer, and how many times as early an answer is complete on average; and how many tokens
it drafted and accepted. With one thread, CPU time equals the clock if nothing else runs. Rounds alternate and medians
count, because machines are noisy. Then the cost of a step that verifies 1, 2, 4 or 8 drafted tokens for each sequence,
against a step without.

Workloads: the bundled model, greedy, with a document's question (`rag`) and with its output when it may not stop
(`chat`); and networks that compute as usual but with scripted output (`scripted`): long passages of the prompt with
something else between them (`quotes`), short ones (`phrases`), or nothing that occurred before (`novel`).

    python benchmarks/speculation.py                               # the bundled model, float32
    python benchmarks/speculation.py --qwen --tokens 48 --rounds 3 # Qwen3-0.6B's shape, random weights, int8
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor

from shards.bundled import weights
from shards.bundled.documents import document, facts_within, prompt
from shards.engine import Engine, EngineOptions
from shards.exec.batch import Batch, Row
from shards.kv.keys import BLOCK_TOKENS
from shards.model import Model, PagedNetwork
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.loading import load_weights
from shards.nouns import SamplingParams, Submission
from shards.threads import use_threads

SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QUOTED = {"quotes": 48, "phrases": 8, "novel": 0}
"""Tokens of a passage before a script continues elsewhere; 0: it never repeats."""

PASSAGE = 64
"""Tokens of a passage in a scripted prompt."""


@dataclass(frozen=True)
class Workload:
    """`prompts(round)` are new each time, so that no cache helps; `quoted` is None if the model's own output counts."""

    name: str
    prompts: Callable[[int], list[list[int]]]
    tokens: int
    quoted: int | None = None


@dataclass(frozen=True)
class Timed:
    """Seconds of CPU, per token until the last answer is complete, and until an answer is complete on average."""

    token_s: float
    answer_s: float


class Scripted:
    """A network that computes, and then follows a script: after each token comes its successor, as in the prompts.

    So it quotes a passage, until at a multiple of `quoted` positions a token follows that may be any of the first
    `prompt_tokens` of the vocabulary, which are the prompt's. If `quoted` is 0, tokens are from the whole vocabulary.
    """

    def __init__(self, inner: PagedNetwork, quoted: int, prompt_tokens: int) -> None:
        self._inner, self._quoted = inner, quoted
        self._range = prompt_tokens if quoted else inner.vocabulary
        self.vocabulary, self.context_tokens = inner.vocabulary, inner.context_tokens
        self.block_bytes = inner.block_bytes

    def allocate(self, blocks: int) -> None:
        self._inner.allocate(blocks)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        logits = self._inner.forward(batch)
        ids, positions = batch.token_ids[batch.logit_rows], batch.positions[batch.logit_rows]
        elsewhere = (positions * 7919 + ids * 104729 + 31) % self._range
        goes_on = positions % self._quoted != 0 if self._quoted else torch.zeros_like(positions, dtype=torch.bool)
        next_ids = torch.where(goes_on, (ids + 1) % self.vocabulary, elsewhere)
        logits[torch.arange(len(next_ids)), next_ids] = 1e4
        return logits


class Contestant:
    """One engine that lives through all rounds, as a shard does."""

    def __init__(self, network: PagedNetwork, work: Workload, *, speculate: str) -> None:
        scripted = network if work.quoted is None else Scripted(network, work.quoted, len(work.prompts(0)[0]))
        model = Model("bench", scripted)
        self.engine = Engine(model, EngineOptions(kv_bytes=2**29, max_running=64, speculate=speculate))
        self.work = work

    def run(self, number: int) -> Timed:
        """Answer all prompts of a round, which arrive at once."""
        prompts = self.work.prompts(number)
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        started = time.process_time()
        for place, ids in enumerate(prompts):
            key = (number, place)
            self.engine.submit(Submission(key, len(ids), self.work.tokens, sampling=sampling))
            self.engine.extend(key, np.asarray(ids, dtype="<u4").tobytes())
        drawn, ends = 0, list[float]()
        while self.engine.has_work:
            report = self.engine.step()
            drawn += sum(len(drawn_tokens.token_ids) for drawn_tokens in report.drawn)
            ends += [time.process_time() - started] * len(report.finished)
            self.load = report.load
        assert drawn == len(prompts) * self.work.tokens
        return Timed((time.process_time() - started) / drawn, statistics.mean(ends))


def compare(network_of: Callable[[], PagedNetwork], work: Workload, rounds: int) -> None:
    both = {name: Contestant(network_of(), work, speculate=name) for name in ("off", "auto")}
    times: dict[str, list[Timed]] = {name: [] for name in both}
    for number in range(rounds + 1):
        for name in sorted(both, reverse=bool(number % 2)):
            times[name].append(both[name].run(number))
    # the first round warms up
    pairs = list(zip(times["off"][1:], times["auto"][1:], strict=True))
    ratios = [off.token_s / auto.token_s for off, auto in pairs]
    sooner = statistics.median(off.answer_s / auto.answer_s for off, auto in pairs)
    load, rate = both["auto"].load, 1 / statistics.median(off.token_s for off, _ in pairs)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    drafts = f"{load.drafted_tokens:6} drafted, {load.accepted_tokens:6} accepted"
    print(
        f"  {work.name:20} off {rate:7.1f} tok/s   auto {statistics.median(ratios):5.2f}x ({spread}), "
        f"an answer {sooner:5.2f}x   {drafts}"
    )


def spoken(requests: int, prompt_tokens: int, tokens: int, name: str) -> Workload:
    """Questions about documents, answered by the bundled model itself."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights() / "tokenizer.json"))

    def prompts(number: int) -> list[list[int]]:
        rng = random.Random(number)
        papers = [document(rng, facts_within(prompt_tokens)) for _ in range(requests)]
        texts = [prompt(paper.text, rng.choice(paper.questions).question) for paper in papers]
        return [tokenizer.encode(text).ids[:prompt_tokens] for text in texts]

    return Workload(f"{name}, {requests} at once", prompts, tokens)


def scripted(requests: int, prompt_tokens: int, tokens: int, name: str) -> Workload:
    """Prompts of passages in which each token is the successor of the previous one, as `Scripted` continues."""

    def a_prompt(rng: random.Random) -> list[int]:
        starts = list(range(0, prompt_tokens, PASSAGE))
        rng.shuffle(starts)
        return [start + ahead for start in starts for ahead in range(PASSAGE)][:prompt_tokens]

    def prompts(number: int) -> list[list[int]]:
        return [a_prompt(random.Random(1000 * number + place)) for place in range(requests)]

    return Workload(f"{name}, {requests} at once", prompts, tokens, QUOTED[name])


def verify(network: PagedNetwork, rows: int, context: int, rounds: int) -> None:
    """The cost of drafted tokens in the network alone."""
    blocks = context // BLOCK_TOKENS + 1
    network.allocate(rows * blocks)
    batches = {drafted: a_batch(rows, context, 1 + drafted) for drafted in (0, 1, 2, 4, 8)}
    seconds: dict[int, list[float]] = {drafted: [] for drafted in batches}
    for _ in range(rounds + 1):
        for drafted, batch in batches.items():
            started = time.process_time()
            network.forward(batch)
            seconds[drafted].append(time.process_time() - started)
    medians = {drafted: statistics.median(several[1:]) for drafted, several in seconds.items()}
    costs = "  ".join(f"{drafted}: {medians[drafted] / medians[0]:.2f}x" for drafted in batches if drafted)
    print(f"  verify, batch {rows}, context {context}: {medians[0] * 1e3:.1f} ms without; drafted {costs}")


def a_batch(rows: int, context: int, tokens: int) -> Batch:
    """A step of `rows` sequences with `tokens` new ones each, behind `context` positions, with all their logits."""
    blocks = context // BLOCK_TOKENS + 1
    at = torch.arange(context, context + tokens)
    slots = torch.cat([at + row * blocks * BLOCK_TOKENS for row in range(rows)])
    held = [tuple(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
    placed = tuple(Row(row * tokens, tokens, context + tokens, ids) for row, ids in enumerate(held))
    return Batch(slots % 1000, at.repeat(rows), slots, placed, torch.arange(rows * tokens))


def a_qwen(folder: Path) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)).bfloat16().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qwen", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    use_threads(asked.threads)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) if asked.qwen else weights()
        if asked.qwen:
            a_qwen(folder)
        config = read_config(folder)
        decoder = Decoder(config, load_weights(folder, config, dtype="int8" if asked.qwen else "float32"))

    def network() -> PagedNetwork:
        return PagedNetwork(decoder, kv_dtype=torch.bfloat16 if asked.qwen else torch.float32)

    print(f"{decoder!r}, {asked.prompt_tokens} tokens in, {asked.tokens} out, {asked.threads} thread(s)")
    sizes = (asked.prompt_tokens, asked.tokens)
    for batch in asked.batches:
        if not asked.qwen:
            compare(network, spoken(batch, asked.prompt_tokens, 24, "rag"), asked.rounds)
            compare(network, spoken(batch, *sizes, "chat"), asked.rounds)
        for name in QUOTED:
            compare(network, scripted(batch, *sizes, name), asked.rounds)
        verify(network(), batch, asked.prompt_tokens, asked.rounds)


if __name__ == "__main__":
    main()
