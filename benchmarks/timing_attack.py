"""A timing attack: does the time to the first token tell which documents another tenant has asked about?

    python -m benchmarks.timing_attack [--documents 60] [--seed 5]

Two shards with the bundled model behind one router. The victim asks about a document. Right afterwards the attacker
asks about that document and about one that no tenant has asked about, in random order; half of the requests permit
`reuse: chunks`. As a control the victim asks again. All one at a time.

Printed are the medians, cached and blended tokens, and how well the time alone tells the two kinds apart: the
probability that a document of the victim is answered faster than a fresh one (0.5: not at all; Mann and Whitney 1947),
with the range that 95 % of 2,000 random labellings reach.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.rag import SYSTEM, Documents, Engines, Result, asked, send
from shards.bundled import NAME
from shards.bundled.documents import document, facts_within
from tests.engines.routed import KEY, a_router

TOKENS = 700
SLA = """
classes: {{chat: {{}}}}
tenants:
  victim: {{keys: ["{key}"]}}
  attacker: {{keys: ["sha256:4b145faf9135605d2393879f091a86b7e6ebf48b81d0cb7063528152e50448c6"]}}
pools:
  engines: {pool}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""


def faster(ours: Sequence[float], fresh: Sequence[float]) -> float:
    """The probability that one of `ours` is below one of `fresh`."""
    pairs = [(mine < other) + 0.5 * (mine == other) for mine in ours for other in fresh]
    return statistics.fmean(pairs)


def chance(times: Sequence[float], first: int, rng: random.Random) -> tuple[float, float]:
    """What 95 % of random labellings of `times` reach."""
    found = []
    for _ in range(2000):
        mixed = rng.sample(times, len(times))
        found.append(faster(mixed[:first], mixed[first:]))
    found.sort()
    return found[50], found[-51]


def body(text: Documents, *, reuse: bool) -> dict[str, Any]:
    """A question about one document."""
    usual = {
        "model": NAME,
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    more = {"reuse": "chunks"} if reuse else {}
    return {**usual, **more, "messages": [SYSTEM, asked("what is said there?")], "documents": text}


async def attack(documents: int, seed: int) -> None:
    """Run it and print what it found."""
    rng = random.Random(seed)
    made = [document(random.Random(seed * 10_000 + at), facts_within(TOKENS)).text for at in range(2 * documents)]
    corpus = [[{"id": f"d{at}", "text": text}] for at, text in enumerate(made)]
    known, fresh = corpus[:documents], corpus[documents:]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        async with (
            a_router(await Engines("own", Path(folder), stack).fresh(), SLA) as (_, router),
            aiohttp.ClientSession() as http,
        ):

            async def ask(texts: Documents, into: Result, *, reuse: bool, key: str = KEY) -> None:
                assert router.http_url is not None
                await send(http, router.http_url, body(texts, reuse=reuse), "", into, key=key)

            warm, again = Result(), Result()
            found = {"victim's": Result(), "fresh": Result()}
            for at, (ours, new) in enumerate(zip(known, fresh, strict=True)):
                reuse = at % 2 == 1
                await ask(ours, warm, reuse=reuse)
                for kind, each in rng.sample([("victim's", ours), ("fresh", new)], 2):
                    await ask(each, found[kind], reuse=reuse, key="an-attacker")
                await ask(ours, again, reuse=reuse)
    print("| documents | TTFT P50, ms | cached | blended |\n|---|---|---|---|")
    rows = {"victim, first time": warm, **{f"attacker, {kind}": seen for kind, seen in found.items()}}
    for name, seen in {**rows, "victim, again": again}.items():
        print(f"| {name} | {1e3 * statistics.median(seen.ttft_s):.1f} | {seen.cached_tokens} | {seen.blended_tokens} |")
    for name, some, others in (
        ("the attacker tells them apart with", found["victim's"], found["fresh"]),
        ("control, the victim's second time against its first", again, warm),
    ):
        low, high = chance([*some.ttft_s, *others.ttft_s], len(some.ttft_s), rng)
        print(f"{name}: {faster(some.ttft_s, others.ttft_s):.3f} (by chance {low:.3f} to {high:.3f})")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    asyncio.run(attack(arguments.documents, arguments.seed))


if __name__ == "__main__":
    main()
