"""Hit rate of 1, 2, 4 and 8 routers with a shared Redis on the caches of eight simulated shards, against one router.

    python benchmarks/replicas.py [--routers 1 2 4 8] [--kinds learnt exact] [--ways shared stopped unshared] [--pace 1]

Routers are whole gateways in one process on a real Redis (that of the tests); each turn of a conversation goes to
any of them, as behind a load balancer. Time is real; a `--pace` of 10 makes it ten times as fast for shards,
think times and the routers' clock, so that 150 s take 15, and the 15 ms between two exchanges with Redis are 150 ms,
which is harder than reality. `stopped`: Redis is killed for 60 of these seconds in the middle and comes back empty.
`unshared` has no Redis. Shards report no load and, if they are `learnt`, no cache: only how much of an answered
prompt was cached.

Time in which the process got no processor does not pass (`steady_loop.py`); `stalled` is its amount. A router
measures how long answers take, and a machine's stalls, times the pace, add to that and make it spread prompts over
shards: with `--count-stalls` hit rates depend on other work on the machine. `news late`: the delay of one router's
messages at the others, median and 99th percentile, in seconds of the shards.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.simulated_shards import Cache, SimulatedCaller, SimulatedShard, a_config
from benchmarks.steady_loop import run_steadily
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.start.build import build
from shards.kv.keys import BLOCK_TOKENS
from tests.router.shared.store.parts import RedisServer, a_redis

SHARDS, CACHE_BLOCKS = 8, 2048
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 24, 24
TURNS, TURN_BLOCKS, NEW_TOKENS = 8, (2, 10), 64
CONVERSATIONS_PER_S, THINK_S = 1.2, 8.0
OUTAGE_S = 60.0


class Turn(NamedTuple):
    """One request, `at_s` seconds after the beginning."""

    at_s: float
    tokens: bytes


class Run(NamedTuple):
    """The result of one run. `outage_rate` is the hit rate of requests while Redis was away, `late_s` the delays of
    messages, `took_s` the run's duration, of which the process computed for `cpu_s`."""

    rate: float
    outage_rate: float
    failed: int
    late_s: Sequence[float]
    took_s: float
    cpu_s: float


def conversations(seconds: float) -> list[Turn]:
    """Conversations that begin evenly and grow by a few blocks each turn, on a few long system prompts."""
    rng = random.Random(3)
    turns: list[Turn] = []
    for number in range(int(seconds * CONVERSATIONS_PER_S)):
        at_s = number / CONVERSATIONS_PER_S
        tokens = _filled(rng.randrange(SYSTEM_PROMPTS), SYSTEM_BLOCKS)
        for turn in range(TURNS):
            tokens += _filled(1000 + number * TURNS + turn, rng.randint(*TURN_BLOCKS))
            turns.append(Turn(at_s, tokens))
            at_s += 2.0 + rng.expovariate(1 / THINK_S)
    return sorted(turn for turn in turns if turn.at_s < seconds)


def _filled(seed: int, blocks: int) -> bytes:
    return np.full(blocks * BLOCK_TOKENS, seed, np.uint32).tobytes()


async def run(
    turns: Sequence[Turn], routers: int, kind: str, *, pace: float, server: RedisServer | None, stop: bool
) -> Run:
    """Distribute `turns` over the routers; `stop`: Redis is away in the middle."""
    caches = [Cache(f"own-{number}", CACHE_BLOCKS, pace) for number in range(SHARDS)]
    dealer, middle_s = random.Random(5), turns[-1].at_s / 2
    outage = (middle_s - OUTAGE_S / 2, middle_s + OUTAGE_S / 2)
    async with AsyncExitStack() as stack:
        config = a_config(None if server is None else server.url, routers)
        gateways = [await _started(stack, caches, kind, config, number, pace) for number in range(routers)]
        loop, late_s = asyncio.get_running_loop(), list[float]()
        for gateway in gateways:
            _measure(gateway, late_s)
        began, marks, real, cpu = loop.time(), list[tuple[int, int]](), time.monotonic(), time.process_time()

        async def ask(number: int, turn: Turn) -> None:
            await asyncio.sleep(turn.at_s / pace - (loop.time() - began))
            await serve(SimulatedCaller(str(number), turn.tokens, NEW_TOKENS), dealer.choice(gateways))

        async def mark(at_s: float, act: str) -> None:
            await asyncio.sleep(at_s / pace)
            marks.append(_counts(caches))
            if stop and server is not None:
                await asyncio.to_thread(getattr(server, act))

        acts = (mark(outage[0], "stop"), mark(outage[1], "start"))
        done = await asyncio.gather(*(ask(*numbered) for numbered in enumerate(turns)), *acts, return_exceptions=True)
        hits, asked = _counts(caches)
        took_s, cpu_s = time.monotonic() - real, time.process_time() - cpu
    for failure in [result for result in done if result is not None][:3]:
        print("  failed:", repr(failure))
    (hits_then, asked_then), (hits_later, asked_later) = marks
    during = (hits_later - hits_then) / max(1, asked_later - asked_then)
    return Run(hits / asked, during, sum(result is not None for result in done), late_s, took_s, cpu_s)


def _measure(gateway: Gateway, late_s: list[float]) -> None:
    """Record how late `gateway` receives the others' messages."""
    hear = gateway.beliefs.hear

    def timed(news: Any, at: float) -> None:
        late_s.append(gateway.clock() - at)
        hear(news, at)

    gateway.beliefs.hear = timed  # type: ignore[method-assign]


async def _started(
    stack: AsyncExitStack, caches: Sequence[Cache], kind: str, config: object, number: int, pace: float
) -> Gateway:
    loop = asyncio.get_running_loop()
    shards = [SimulatedShard(cache, tells=kind == "exact") for cache in caches]
    gateway = build(
        config,  # type: ignore[arg-type]
        backends=lambda _: [*shards],
        clock=lambda: loop.time() * pace,
        rng=random.Random(number),
    ).gateway
    if kind == "exact":
        for cache in caches:
            cache.hear.append(gateway.beliefs.index)
    stack.push_async_callback(gateway.tokenizers.close)
    await gateway.admission.store.start()
    stack.push_async_callback(gateway.admission.store.close)
    await stack.enter_async_context(gateway.cluster)
    if gateway.replicas is not None:
        await gateway.replicas.start()
        stack.push_async_callback(gateway.replicas.close)
    for shard in shards:
        await gateway.cluster.probe(shard.name)
    return gateway


def _counts(caches: Sequence[Cache]) -> tuple[int, int]:
    return sum(cache.hit_blocks for cache in caches), sum(cache.asked_blocks for cache in caches)


def cases(kinds: Sequence[str], ways: Sequence[str], routers: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    for kind in kinds:
        yield from ((kind, way, count) for way in ways for count in routers)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--routers", nargs="+", type=int, default=[1, 2, 4, 8])
    options.add_argument("--kinds", nargs="+", default=["learnt", "exact"])
    options.add_argument("--ways", nargs="+", default=["shared", "stopped", "unshared"])
    options.add_argument("--seconds", type=float, default=150.0)
    options.add_argument("--pace", type=float, default=1.0)
    options.add_argument("--count-stalls", action="store_true")
    chosen = options.parse_args()
    turns = conversations(chosen.seconds)
    print(f"{len(turns)} turns of conversations in {chosen.seconds:.0f} s, at {chosen.pace:g} times the speed")
    base: dict[str, Run] = {}
    with a_redis() as server:
        for kind, way, count in cases(chosen.kinds, chosen.ways, chosen.routers):
            server.clean()
            redis = None if way == "unshared" else server
            work = run(turns, count, kind, pace=chosen.pace, server=redis, stop=way == "stopped")
            found, stalled_s = run_steadily(work, counts_stalls=chosen.count_stalls)
            baseline = base.setdefault(kind, found)
            words = f"hit rate {found.rate:6.1%}  {found.rate / baseline.rate:5.3f} of one router's"
            during = f"in the middle {found.outage_rate:6.1%}  {found.outage_rate / baseline.outage_rate:5.3f}"
            late = "{:.3f} {:.3f} s".format(*np.quantile(found.late_s or [0.0], (0.5, 0.99)))
            machine = f"stalled {stalled_s / found.took_s:4.0%}  computed {found.cpu_s / found.took_s:4.0%}"
            print(f"{kind:6}  {way:8}  {count} routers  {words}   {during}   {found.failed} failed   ", end="")
            print(f"news late {late}   {machine}", flush=True)


if __name__ == "__main__":
    main()
