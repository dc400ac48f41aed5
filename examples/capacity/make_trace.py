"""Writes trace.jsonl: ten minutes of a chat beside questions about documents, with a rush in the middle.

    python examples/capacity/make_trace.py > examples/capacity/trace.jsonl

Synthetic, and the same each time. Chats of `assistant` begin with one system prompt and continue in turns; questions of
`search` each begin with one of 40 documents, the popular ones more often (Zipf); a few of its jobs ask for `batch`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator

BLOCK = 512
MINUTES = 10
DOCUMENTS = 40
SYSTEM_PROMPT = [1]
"""The first 512 tokens of every chat."""


def rate(minute: float) -> float:
    """Requests per second; the rush lasts from the fourth minute to the sixth."""
    return 2.4 if 4 <= minute < 6 else 1.2


def lines(seed: int = 7) -> Iterator[dict[str, object]]:
    """The requests in order of time."""
    rng, now_s, fresh = random.Random(seed), 0.0, iter(range(10_000, 100_000))
    documents = [[next(fresh) for _ in range(rng.randrange(6, 25))] for _ in range(DOCUMENTS)]
    popularity = [1 / (at + 1) for at in range(DOCUMENTS)]
    talks: list[list[int]] = []
    while True:
        now_s += rng.expovariate(rate(now_s / 60))
        if now_s >= 60 * MINUTES:
            return
        if rng.random() < 0.35:
            (document,) = rng.choices(documents, popularity)
            question = rng.randrange(30, 300)
            length, ids = BLOCK * len(document) + question, document
            more = {"tenant": "search", "priority": "batch"} if rng.random() < 0.2 else {"tenant": "search"}
            answer = rng.randrange(80, 250)
        else:
            talk = rng.choice(talks[-20:]) if talks and rng.random() < 0.6 else SYSTEM_PROMPT
            ids = [*talk, next(fresh)]
            talks.append(ids)
            length, more = BLOCK * len(ids) - rng.randrange(BLOCK // 2), {"tenant": "assistant"}
            answer = rng.randrange(40, 300)
        yield {
            "timestamp": round(1000 * now_s),
            "input_length": length,
            "output_length": answer,
            "hash_ids": ids,
            **more,
        }


def main() -> None:
    """Print the trace."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for line in lines():
        print(json.dumps(line, separators=(",", ":")))


if __name__ == "__main__":
    main()
