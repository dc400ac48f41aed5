"""Hit rate of real conversations on eight simulated shards, as a share of one infinite cache.

    python benchmarks/hit_rate.py TRACE [--tokens 500k 2M] [--requests 12031]

TRACE is Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl): one
request per line; its `hash_ids` name blocks of 512 tokens. It is replayed on a virtual clock through the whole router
with the shipped policy; `--tokens` is the cache size of each shard. Only the shards are simulated, and events of
`exact` ones arrive at once. `spread` are the same shards with prompts distributed in turn; the ideal is one cache that
never evicts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.simulated_shards import Cache, SimulatedCaller, SimulatedShard, a_config
from policies.prefix.match import Match
from policies.quantities import read_tokens
from router.call.pipeline import serve
from router.fleet.beliefs import Beliefs
from router.fleet.prompt_keys import PromptKeys
from router.start.build import build
from shards.kv.keys import BLOCK_TOKENS, block_keys
from simulation.virtual_time import run_virtually

SHARDS = 8
TRACE_BLOCK = 512


class Line(NamedTuple):
    """One request of the trace."""

    at_s: float
    tokens: bytes
    new_tokens: int


class Blind(Beliefs):
    """An index without entries: a router without an index."""

    def longest(self, prompt: PromptKeys) -> Mapping[str, Match]:  # noqa: ARG002 - the answer does not depend on it
        return {}


def trace(path: Path, most: int) -> list[Line]:
    """The requests of the trace, each block of 512 tokens filled with its id."""
    lines = []
    with path.open() as file:
        for text, _ in zip(file, range(most), strict=False):
            entry = json.loads(text)
            ids = np.repeat(np.array(entry["hash_ids"], np.uint32), TRACE_BLOCK)[: entry["input_length"]]
            lines.append(Line(entry["timestamp"] / 1000, ids.tobytes(), entry["output_length"]))
    return lines


def ideal(lines: Sequence[Line]) -> float:
    """The share of blocks that one infinite cache holds when they are requested."""
    cache = Cache("ideal", sys.maxsize)
    for line in lines:
        cache.take(block_keys(line.tokens, 0))
    return cache.hit_blocks / cache.asked_blocks


def spread(lines: Sequence[Line], most_blocks: int) -> float:
    """The same if prompts are distributed to the shards in turn."""
    caches = [Cache(str(number), most_blocks) for number in range(SHARDS)]
    for number, line in enumerate(lines):
        caches[number % SHARDS].take(block_keys(line.tokens, 0))
    return sum(cache.hit_blocks for cache in caches) / sum(cache.asked_blocks for cache in caches)


async def replay(lines: Sequence[Line], most_blocks: int, kind: str) -> tuple[float, int]:
    """Hit rate, and the number of failed requests."""
    clock = asyncio.get_running_loop().time
    caches = [Cache(f"own-{number}", most_blocks) for number in range(SHARDS)]
    shards = [SimulatedShard(cache, tells=kind == "exact") for cache in caches]
    gateway = build(a_config(), backends=lambda _: [*shards], clock=clock, rng=random.Random(1)).gateway
    if kind == "none":
        gateway.beliefs = Blind(lambda _: False, clock)
    for cache in caches:
        if kind == "exact":
            cache.hear.append(gateway.beliefs.index)

    async def ask(number: int, line: Line) -> None:
        await asyncio.sleep(line.at_s)
        await serve(SimulatedCaller(str(number), line.tokens, line.new_tokens), gateway)

    async with gateway.cluster:
        for shard in shards:
            await gateway.cluster.probe(shard.name)
        done = await asyncio.gather(*(ask(*numbered) for numbered in enumerate(lines)), return_exceptions=True)
    await gateway.tokenizers.close()
    for failure in [result for result in done if result is not None][:3]:
        print("  failed:", repr(failure))
    hits, asked = sum(cache.hit_blocks for cache in caches), sum(cache.asked_blocks for cache in caches)
    return hits / asked, sum(result is not None for result in done)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("trace", type=Path)
    options.add_argument("--tokens", nargs="+", default=[500_000, 2_000_000], type=read_tokens)
    options.add_argument("--requests", type=int, default=sys.maxsize)
    chosen = options.parse_args()
    lines = trace(chosen.trace, chosen.requests)
    best = ideal(lines)
    print(f"{len(lines)} requests, {SHARDS} shards; one infinite cache hits {best:.1%} of the blocks")
    for tokens in chosen.tokens:
        most_blocks = tokens // BLOCK_TOKENS
        rate = spread(lines, most_blocks)
        print(f"{tokens:>10,} tokens each  spread  {rate:6.1%}  {rate / best:6.1%} of ideal", flush=True)
        for kind in ("none", "learnt", "exact"):
            rate, failed = run_virtually(replay(lines, most_blocks, kind))
            words = f"{rate:6.1%}  {rate / best:6.1%} of ideal  {failed} failed"
            print(f"{tokens:>10,} tokens each  {kind:6}  {words}", flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
