"""Answers and times of prompts with documents that are blended from chunks, by the share that is computed again.

    python -m benchmarks.blending [--questions 1000]       # answers of a model that has to join documents
    python -m benchmarks.blending --selection              # the same, for ways to choose what is computed again
    python -m benchmarks.blending --random [--prompts 8]   # a larger random model in bfloat16: KL divergence and times

1. Libraries of records and of registers, which give meaning to the records' words. Each record is seen once behind
   another register. Then come prompts with the records in random orders, each with one question. Two questions in three
   need a register. An answer is right if it is the value, to the last token. Of each way: right answers, KL divergence
   of the first token's distribution from the exact one, and processor time to the first token.
2. The same for random weights and documents of random tokens, with more layers and longer prompts.

One thread, one request at a time, one process for all ways; medians.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.blending_parts import library
from benchmarks.blending_parts.library import Paper
from shards.bundled import vocabulary, weights
from shards.bundled.documents import Question
from shards.engine import Engine, EngineOptions
from shards.exec.batch import Batch
from shards.exec.moves import KvMove
from shards.kv.cache import KvCache, extents_of
from shards.model import Model, PagedNetwork
from shards.network.config import NetworkConfig, Rope
from shards.network.config_file import read_config
from shards.network.decoder import Decoder
from shards.network.heads import HeadProjection
from shards.network.layers import DenseLinear, LayerWeights, Weights
from shards.network.loading import load_weights
from shards.network.mlp import GatedMlp
from shards.network.rope import squared_distances
from shards.nouns import Blend, DocumentSpan, SamplingParams, Submission

CHECKPOINT = Path(__file__).parent / "blending_parts" / "weights"
BUDGETS = (0.0, 0.05, 0.1, 0.15, 0.3, 1.0)
PROMPTS_PER_LIBRARY = 10


class Listening(PagedNetwork):
    """A network that keeps the last logits."""

    logits: Tensor | None = None

    def forward(self, batch: Batch) -> Tensor:
        logits = super().forward(batch)
        self.logits = logits if len(logits) else self.logits
        return logits


class Naive(Listening):
    """A network that copies KV and leaves keys as if they stood where they were computed."""

    def blend(self, move: KvMove) -> None:
        cache = self._allocated
        slots = cache.slots(extents_of(move.target, move.into, move.into + move.tokens))
        source = extents_of(move.source, move.start, move.start + move.tokens)
        for layer in range(self._decoder.config.layers):
            cache.write(layer, slots, torch.cat(cache.read(layer, source)).transpose(0, 1).clone())


class FirstTokens(Listening):
    """A network that measures nothing: of equal deviations the first tokens count."""

    def deviations(self, move: KvMove) -> list[float]:
        return [0.0] * move.tokens


class SecondLayer(Listening):
    """A network that measures the second layer alone, the first in which KV depends on other tokens."""

    def deviations(self, move: KvMove) -> list[float]:
        decoder, cache = self._decoder, self._allocated
        assert isinstance(cache, KvCache)
        computed = torch.cat(cache.read(1, extents_of(move.target, move.into, move.into + move.tokens)))
        return [float(value) for value in squared_distances(decoder._moved(1, move, cache), computed)]


@dataclass(frozen=True)
class Given:
    """A prompt with the places of its documents, and the tokens of the right answer."""

    tokens: list[int]
    documents: tuple[DocumentSpan, ...]
    answer: list[int] = field(default_factory=list)


@dataclass
class Tally:
    """The results of one way."""

    right: int = 0
    asked: int = 0
    blended: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)


class Shard:
    """An engine that answers one request after the other."""

    def __init__(self, network: Listening) -> None:
        self._network, self._asked = network, 0
        self.engine = Engine(Model("m", network), EngineOptions(kv_bytes=2**28, step_s=10.0))

    def ask(self, given: Given, domain: str, budget: float | None) -> tuple[list[int], Tensor, float, int]:
        """The answer, the logits of its first token, processor seconds to it, and the blended tokens."""
        self._asked += 1
        key, new = self._asked, max(1, len(given.answer))
        blend = None if budget is None else Blend(given.documents, budget)
        sampling = SamplingParams(ignore_eos=True)
        began, first_s, logits = time.process_time(), math.nan, torch.empty(0)
        self.engine.submit(Submission(key, len(given.tokens), new, domain=domain, sampling=sampling, blend=blend))
        self.engine.extend(key, np.asarray(given.tokens, dtype="<u4").tobytes())
        answer: list[int] = []
        while True:
            report = self.engine.step()
            for drawn in report.drawn:
                if not answer:
                    first_s = time.process_time() - began
                    assert self._network.logits is not None, "a drawn token has logits"
                    logits = self._network.logits[-1].clone()
                answer += drawn.token_ids
            for end in report.finished:
                return answer, logits, first_s, end.blended_tokens


class Reader:
    """Prompts of papers for the model of this benchmark."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(weights() / "tokenizer.json"))
        self._marks = vocabulary.special_ids(self._tokenizer)

    def given(self, papers: Sequence[Paper], question: Question) -> Given:
        """The prompt of `question`, which ends in the beginning of the answer, and the value that follows."""
        tokens = [self._marks[vocabulary.BOS], self._marks[vocabulary.ROLES["user"]], *self._ids(library.HEADING)]
        documents = []
        for paper in papers:
            ids = self._ids(paper.text)
            documents.append(DocumentSpan(len(tokens), len(tokens) + len(ids)))
            tokens += ids
        stem, _, value = question.answer.partition(" is ")
        tokens += [*self._ids(f"Question: {question.question}"), self._marks[vocabulary.END]]
        tokens += [self._marks[vocabulary.ROLES["assistant"]], *self._ids(f"{stem} is")]
        return Given(tokens, tuple(documents), [*self._ids(f" {value}"), self._marks[vocabulary.END]])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Shelf:
    """One library: `records`, the `registers` of its questions, and `others` that stood there the first time."""

    registers: list[Paper]
    others: list[Paper]
    records: list[Paper]


def a_shelf(rng: random.Random) -> Shelf:
    aliases, things = rng.sample(library.ALIASES, 18), library.things(rng, "held-out")
    halves = (tuple(aliases[::2]), tuple(aliases[1::2]))
    records = [library.record(rng, tuple(aliases[at::6]), things, rng.randint(2, 4)) for at in range(6)]
    registers, others = ([library.register(rng, half) for half in halves] for _ in range(2))
    return Shelf(registers, others, records)


def divergence(exact: Tensor, other: Tensor) -> float:
    """KL divergence in nats of two next-token distributions, given as logits."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def trained(kind: type[Listening]) -> Shard:
    config = read_config(CHECKPOINT)
    decoder = Decoder(config, load_weights(CHECKPOINT, config, dtype="float32"))
    return Shard(kind(decoder, kv_dtype=torch.float32))


def ways_of_budgets(budgets: Sequence[float]) -> dict[str, tuple[Shard, float | None]]:
    ways: dict[str, tuple[Shard, float | None]] = {"exact": (trained(Listening), None)}
    ways["reordered"] = ways["exact"]
    ways |= {f"blended, {budget:.0%} computed again": (trained(Listening), budget) for budget in budgets}
    return ways | {"naive concatenation": (trained(Naive), 0.0)}


def ways_of_selection() -> dict[str, tuple[Shard, float | None]]:
    ways: dict[str, tuple[Shard, float | None]] = {"exact": (trained(Listening), None)}
    ways["15% by the deviation in all layers"] = (trained(Listening), 0.15)
    ways["15% by the deviation in the second layer"] = (trained(SecondLayer), 0.15)
    return ways | {"15%, the first tokens": (trained(FirstTokens), 0.15)}


def answers(questions: int, ways: dict[str, tuple[Shard, float | None]]) -> None:
    """Print right answers and times of `ways`; the first one is exact."""
    rng, reader = random.Random(44), Reader()
    tallies = {name: Tally() for name in ways}
    while tallies["exact"].asked < questions:
        shelf, domain = a_shelf(rng), f"library {tallies['exact'].asked}"
        asked = library.questions([*shelf.registers, *shelf.records])
        hard, easy = ([question for question, needs in asked if needs is wanted] for wanted in (True, False))
        seen = [
            reader.given([*shelf.others, *rng.sample(shelf.records, 6)], easy[0]),
            reader.given(shelf.registers, easy[0]),
        ]
        for shard, budget in ways.values():
            if budget is not None:
                for given in seen:
                    shard.ask(given, domain, budget or 0.5)
        for _ in range(min(PROMPTS_PER_LIBRARY, questions - tallies["exact"].asked)):
            papers = [*shelf.registers, *rng.sample(shelf.records, 6)]
            question = rng.choice(hard if rng.random() < 2 / 3 else easy)
            given = reader.given(papers, question)
            shuffled = reader.given(rng.sample(papers, len(papers)), question)
            exact = None
            for name, (shard, budget) in ways.items():
                one = shuffled if name == "reordered" else given
                # without reuse nothing is cached: each prompt has a domain of its own
                own = domain if budget is not None else f"{domain}, {name}, {tallies['exact'].asked}"
                answer, logits, seconds, blended = shard.ask(one, own, budget)
                exact = logits if exact is None else exact
                tally = tallies[name]
                tally.right += answer == given.answer
                tally.asked += 1
                tally.blended, tally.tokens = tally.blended + blended, tally.tokens + len(given.tokens)
                tally.seconds.append(seconds)
                tally.divergence.append(divergence(exact, logits))
    show(tallies)


def show(tallies: dict[str, Tally]) -> None:
    print("| way | right | of | tokens blended | KL divergence, nats | processor time to the first token, ms |")
    print("|---|---|---|---|---|---|")
    for name, tally in tallies.items():
        kl = statistics.fmean(tally.divergence)
        time_ms = 1000 * statistics.median(tally.seconds)
        share = tally.blended / tally.tokens
        print(f"| {name} | {tally.right} | {tally.asked} | {share:.2f} | {kl:.4f} | {time_ms:.1f} |", flush=True)


def a_random_network(dtype: torch.dtype) -> Listening:
    """A network of 12 layers and 47 million weights."""
    torch.manual_seed(44)
    config = NetworkConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        heads=8,
        kv_heads=4,
        head_dim=64,
        max_positions=8192,
        rms_norm_eps=1e-5,
        rope=Rope(theta=500_000.0),
        windows=(None,) * 12,
    )

    def matrix(rows: int, columns: int, gain: float = 1.0) -> DenseLinear:
        return DenseLinear((torch.randn(rows, columns) * gain / math.sqrt(columns)).to(dtype))

    wide, ones = config.heads * config.head_dim, torch.ones(config.hidden_size, dtype=dtype)
    layers = tuple(
        LayerWeights(
            attention=HeadProjection(
                matrix(wide + 2 * config.kv_heads * config.head_dim, config.hidden_size, 1.4),
                matrix(config.hidden_size, wide),
                config.heads,
                config.kv_heads,
                config.head_dim,
                config.rms_norm_eps,
            ),
            mlp=GatedMlp(
                matrix(2 * config.intermediate_size, config.hidden_size),
                matrix(config.hidden_size, config.intermediate_size),
            ),
            attention_norm=ones,
            mlp_norm=ones,
        )
        for _ in config.windows
    )
    embedding = torch.randn(config.vocab_size, config.hidden_size).to(dtype)
    head = matrix(config.vocab_size, config.hidden_size, 2.0)
    return Listening(Decoder(config, Weights(embedding, layers, ones, head, dtype)), kv_dtype=dtype)


def random_weights(prompts: int, documents: int, tokens: int) -> None:
    """Print the second table."""
    rng = random.Random(44)
    network = a_random_network(torch.bfloat16)
    shard, tallies = Shard(network), {"exact": Tally()}
    tallies |= {f"blended, {budget:.0%} computed again": Tally() for budget in BUDGETS}
    texts = [[rng.randrange(8192) for _ in range(tokens)] for _ in range(2 * documents)]

    def a_prompt() -> Given:
        ids, spans = [rng.randrange(8192) for _ in range(16)], []
        for text in rng.sample(texts, documents):
            spans.append(DocumentSpan(len(ids), len(ids) + len(text)))
            ids += text
        return Given([*ids, *(rng.randrange(8192) for _ in range(24))], tuple(spans))

    head = a_prompt().tokens[:16]
    for at in range(0, len(texts), documents):
        ids, spans = [*head], []
        for text in texts[at : at + documents]:
            spans.append(DocumentSpan(len(ids), len(ids) + len(text)))
            ids += text
        shard.ask(Given([*ids, 1], tuple(spans)), "", 0.5)
    for number in range(prompts):
        given = a_prompt()
        given = Given([*head, *given.tokens[16:]], given.documents)
        exact = None
        for name, budget in zip(tallies, (None, *BUDGETS), strict=True):
            _, logits, seconds, blended = shard.ask(
                given, "" if budget not in (None, 1.0) else f"{name} {number}", budget
            )
            exact = logits if exact is None else exact
            tally = tallies[name]
            tally.asked, tally.blended, tally.tokens = (
                tally.asked + 1,
                tally.blended + blended,
                tally.tokens + len(given.tokens),
            )
            tally.right += int(logits.argmax() == exact.argmax())
            tally.seconds.append(seconds)
            tally.divergence.append(divergence(exact, logits))
    show(tallies)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--selection", action="store_true", help="ways to choose the tokens to compute again")
    parser.add_argument("--random", action="store_true", help="random weights in bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="of a document of random tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.random:
        random_weights(arguments.prompts, arguments.documents, arguments.tokens)
    else:
        answers(arguments.questions, ways_of_selection() if arguments.selection else ways_of_budgets(arguments.budgets))


if __name__ == "__main__":
    main()
