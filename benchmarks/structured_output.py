"""Cost of constraining answers to a schema: one engine on a CPU, the bundled model, the same requests with and without.

Prints output tokens per second of a batch in which none, one, half and all answers have a schema, and the cost of one
mask for a vocabulary of this size and for a larger one. Rounds alternate, medians count. Seconds are those of the
process on its core, so that other work on the machine does not count.

    python benchmarks/structured_output.py                              # 32 sequences, 96 tokens each
    python benchmarks/structured_output.py --tokenizer tokenizer.json --eos 151645   # masks of a large vocabulary too
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from tokenizers import Tokenizer

from shards.bundled import weights
from shards.engine import Engine, EngineOptions
from shards.exec.fake import FakeNetwork
from shards.exec.sampling import Sampler, sample
from shards.grammar.compiler import Compiler
from shards.model import Model
from shards.nouns import Grammar, GrammarForm, SamplingParams, Submission
from shards.threads import use_threads

PROMPT_TOKENS = 128


def a_schema(number: int) -> Grammar:
    """A list of people that ends only with the answer, so that every answer is equally long."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "role": {"enum": ["keeper", "builder", "owner", f"guest {number}"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}},
        },
        "required": ["name", "role", "age", "tags"],
        "additionalProperties": False,
    }
    return Grammar(GrammarForm.JSON_SCHEMA, json.dumps({"type": "array", "items": person, "minItems": 1000}))


def tokens_per_s(model: Model, sequences: int, new: int, held: int, schemas: int) -> float:
    """Output tokens per second while all `sequences` draw, of which `held` have one of several schemas."""
    engine = Engine(model, EngineOptions(max_running=sequences, kv_bytes=2**29))
    rng = random.Random(1)
    for key in range(sequences):
        grammar = a_schema(key % schemas) if key < held else None
        sampling = SamplingParams(temperature=1.0, seed=key, ignore_eos=True, grammar=grammar)
        ids = np.array([rng.randrange(100, model.vocabulary) for _ in range(PROMPT_TOKENS)], dtype="<u4")
        engine.submit(Submission(key, len(ids), new, sampling=sampling))
        engine.extend(key, ids.tobytes())
    begun: set[object] = set()
    while len(begun) < sequences:
        begun |= {drawn.key for drawn in engine.step().drawn}
    started, drawn, left = time.process_time(), 0, sequences
    while left:
        report = engine.step()
        # the first to begin are the first to end: only the complete batch is measured
        left -= len(report.finished)
        if report.finished:
            break
        drawn += len(report.drawn)
    seconds = time.process_time() - started
    engine.close()
    return drawn / seconds


def guided(compiler: Compiler, grammar: Grammar, vocabulary: int, eos: int, rows: int) -> Iterator[list[float]]:
    """Seconds of sampling `rows` rows of random logits, of one mask of them, and of the rows without, step by step."""
    compiled = compiler.compile(grammar)
    generator = torch.Generator().manual_seed(1)
    samplers, plain = [], []
    for seed in range(rows):
        params = SamplingParams(temperature=1.0, grammar=grammar, ignore_eos=True)
        sampler = Sampler(params, seed=seed, stop_token_ids=frozenset({eos}), vocabulary=vocabulary)
        sampler.guide = compiled.guide()
        samplers.append(sampler)
        plain.append(
            Sampler(SamplingParams(temperature=1.0), seed=seed, stop_token_ids=frozenset(), vocabulary=vocabulary)
        )
    for _ in range(100):
        logits = torch.randn((rows, vocabulary), generator=generator)
        times = [time.process_time()]
        sample(logits, plain)
        times.append(time.process_time())
        drawn = sample(logits, samplers)
        times.append(time.process_time())
        for sampler in samplers:
            assert sampler.guide is not None
            sampler.guide.allowed()
        times.append(time.process_time())
        for sampler, token in zip(samplers, drawn, strict=True):
            assert token is not None
            sampler.note(token.token_id)
        times.append(time.process_time())
        for sampler in plain:
            sampler.drawn += 1
        yield np.diff(times).tolist()


def print_masks(name: str, model: Model, rows: int) -> None:
    """The time of sampling with and without a schema."""
    started = time.process_time()
    compiler = Compiler.of(model)
    assert compiler is not None
    made_s = time.process_time() - started
    started = time.process_time()
    compiler.compile(a_schema(0))
    compiled_s = time.process_time() - started
    steps = np.array(list(guided(compiler, a_schema(0), model.vocabulary, min(model.eos_token_ids), rows))) / rows * 1e6
    plain, held, mask, note = np.median(steps, axis=0)
    worst = np.percentile(steps[:, 2], 99)
    print(f"{name}: {model.vocabulary} tokens, read in {made_s * 1e3:.0f} ms; the schema, in {compiled_s * 1e3:.1f} ms")
    print(f"  drawing one of {rows} rows: {plain:.0f} us without a schema, {held:.0f} us with one")
    print(f"  of which its mask {mask:.0f} us (p99 {worst:.0f}); noting the token {note:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--schemas", type=int, default=4, help="number of different schemas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, for a measurement of masks alone")
    parser.add_argument("--eos", type=int, default=0)
    asked = parser.parse_args()
    use_threads(asked.threads)
    model = Model.load(weights())
    print_masks("bundled", model, asked.sequences)
    if asked.tokenizer is not None:
        tokenizer = Tokenizer.from_file(str(asked.tokenizer))
        network = FakeNetwork(vocabulary=tokenizer.get_vocab_size())
        print_masks(str(asked.tokenizer), Model("m", network, tokenizer, frozenset({asked.eos})), asked.sequences)
    cases = {"none": 0, "one": 1, "half": asked.sequences // 2, "all": asked.sequences}
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(asked.rounds):
        for name, held in cases.items():
            found[name].append(tokens_per_s(model, asked.sequences, asked.output_tokens, held, asked.schemas))
    base = statistics.median(found["none"])
    for name, rates in found.items():
        rate = statistics.median(rates)
        print(f"{name:>5} of {asked.sequences} held to a schema: {rate:6.0f} tokens/s, {rate / base:.2f}x")


if __name__ == "__main__":
    main()
