"""32 requests at once on a new document of 8,192 tokens: how often four shards compute it, and the time to first token.

    python -m benchmarks.burst [--rounds 3] [--kv-exchange]

Four engines with a small random network (2 layers, 128 wide) in this process, behind a router, one thread each:

- alone: each request is placed as if no other one were there;
- waiting: as it is: requests wait for a backend that computes the beginning of their prompt.

With `--kv-exchange` the shards exchange KV. A document is new in each round. Printed are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import aiohttp

import router.call.bid
from benchmarks.kv_dir import SMALL, a_network
from policies.sla.parse import parse
from router.start.app import Router
from shards.engine import Engine, EngineOptions
from shards.model import Model
from shards.server import ServerOptions, ShardServer
from shards.threads import use_threads
from tests.e2e.cluster import KEYS, TWO_TENANTS

TOKENS, REQUESTS, SHARDS = 8192, 32, 4


class Round(NamedTuple):
    """How often the document was computed, and the seconds to each first token."""

    computed: float
    ttft_s: list[float]


@contextmanager
def alone(is_so: bool) -> Iterator[None]:
    """No request waits for blocks."""
    if not is_so:
        yield
        return
    with patch.object(router.call.bid, "held_back", lambda request, view, decision, *_, **__: decision):  # noqa: ARG005
        yield


async def ask(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[int, float]:
    """The tokens that were computed, and the seconds to the first token."""
    body = {"model": "random", "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began, first_s, usage = time.perf_counter(), 0.0, None
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            first_s = first_s or time.perf_counter() - began
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    assert usage is not None
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"], first_s


async def burst(http: aiohttp.ClientSession, url: str, seed: int) -> Round:
    """One round."""
    rng = random.Random(seed)
    document = [rng.randrange(100, 1900) for _ in range(TOKENS)]
    prompts = [[*document, *(rng.randrange(100, 1900) for _ in range(40))] for _ in range(REQUESTS)]
    found = await asyncio.gather(*(ask(http, url, prompt) for prompt in prompts))
    own = sum(min(computed, 104) for computed, _ in found)
    return Round((sum(computed for computed, _ in found) - own) / TOKENS, [first_s for _, first_s in found])


async def measure(rounds: int, *, exchange: bool) -> None:
    """Print one line for each way."""
    use_threads(1)
    options: dict[str, Any] = {"kv_blocks": 600}
    if exchange:
        options |= {"kv_listen": ("127.0.0.1", 0), "kv_secret": b"of this benchmark", "host_bytes": 64 * 2**20}
    config = parse(TWO_TENANTS.replace("model: bundled", "model: random").replace("12s", "60s"))
    async with AsyncExitStack() as stack:
        shards = []
        for number in range(SHARDS):
            network = a_network(replace(SMALL, max_positions=16_384, vocab_size=2000), "cpu")
            engine = Engine(
                Model("random", network, weights="random, seed 0", dtype="bfloat16"), EngineOptions(**options)
            )
            shards.append(ShardServer(engine, "127.0.0.1:0", ServerOptions(shard=f"own-{number}")))
            await shards[-1].start()
            stack.callback(engine.close)
            stack.push_async_callback(shards[-1].close)
        pool = replace(config.pools["own"], at=tuple(shard.address for shard in shards))
        router = await stack.enter_async_context(Router(replace(config, pools={"own": pool})))
        assert await router.wait_until_reached(30)
        assert router.http_url is not None
        headers = {"authorization": f"Bearer {KEYS['acme']}"}
        http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
        found: dict[str, list[Round]] = {"alone": [], "waiting": []}
        # the first round teaches the router how fast the shards are
        await burst(http, router.http_url, 999)
        for number in range(rounds):
            for at, way in enumerate(found):
                with alone(way == "alone"):
                    found[way].append(await burst(http, router.http_url, 2 * number + at))
        for way, measured in found.items():
            times = [statistics.quantiles(each.ttft_s, n=20) for each in measured]
            p50, p95 = (statistics.median(each[at] for each in times) for at in (9, 18))
            computed = statistics.median(each.computed for each in measured)
            most = max(each.computed for each in measured)
            print(f"{way:8} computed {computed:.2f} times (most {most:.2f}), TTFT P50 {p50:.2f} s, P95 {p95:.2f} s")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-exchange", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.rounds, exchange=arguments.kv_exchange))


if __name__ == "__main__":
    main()
