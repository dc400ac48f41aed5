"""Cost of quotas per request, and overshoot of four replicas, against a bare PING of the same Redis.

    python benchmarks/quota.py [--url redis://localhost:6379] [--requests 3000]

Without --url it starts the Redis of the tests. A request waits for one `reserve`; `settle` happens after it. The
overshoot is that of four guarded stores, a process each, that spend the tokens of one tenant as fast as they can.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles

import redis.asyncio
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from policies.nouns import Limits
from policies.quota.budget import Charge, Descriptor, Reservation
from router.shared.store.base import QuotaStore
from router.shared.store.guarded import GuardedStore, GuardOptions
from router.shared.store.memory import MemoryStore
from router.shared.store.redis import RedisStore
from tests.router.shared.store.parts import a_redis, owed, reserved

REPLICAS = 4
WIDE = (Descriptor("bench", Limits(10**9, 10**9, None, 10**9)),)
USED = Charge(1, 900, 1000)


async def times_us(count: int, once: Callable[[int], Awaitable[object]]) -> list[float]:
    found = []
    for number in range(count):
        began = time.perf_counter()
        await once(number)
        found.append((time.perf_counter() - began) * 1e6)
    return found


async def settle(store: QuotaStore | RedisStore, reservation: Reservation) -> None:
    if isinstance(store, RedisStore):
        await store.settle_all([owed(reservation, USED)])
    else:
        store.settle(reservation, USED)


def show(name: str, found: list[float], floor_us: float | None = None) -> float:
    cuts = quantiles(found, n=100)
    ratio = "" if floor_us is None else f"   {cuts[49] / floor_us:5.2f} x PING"
    print(f"{name:28} p50 {cuts[49]:7.1f} us   p99 {cuts[98]:7.1f} us{ratio}")
    return cuts[49]


async def latencies(url: str, count: int) -> None:
    client = redis.asyncio.Redis.from_url(url)
    floor_us = show("PING", await times_us(count, lambda _: client.ping()))
    await client.aclose()
    guarded = GuardedStore(RedisStore(url), clock=time.time)
    await guarded.start()
    away = GuardedStore(RedisStore("redis://127.0.0.1:1"), clock=time.time, options=GuardOptions(first_backoff_s=60))
    await away.start()
    stores: dict[str, QuotaStore | RedisStore] = {
        "memory": MemoryStore(time.time),
        "redis": RedisStore(url, prefix="plain"),
        "guarded": guarded,
        "guarded, Redis gone": away,
    }
    for name, store in stores.items():
        asked = [Reservation(f"{name}-{n}", WIDE, Charge(1, 1000, 1000)) for n in range(count)]
        show(f"{name}: reserve", await times_us(count, lambda n, s=store, a=asked: reserved(s, a[n])), floor_us)
        show(f"{name}: settle", await times_us(count, lambda n, s=store, a=asked: settle(s, a[n])), floor_us)
        await store.close()


async def spend(url: str, replica: int, limit: int, seconds: float) -> tuple[int, int]:
    """Tokens that one replica admits, and how often it used only its share."""
    descriptors = (Descriptor("overshoot", Limits(tokens_per_minute=limit)),)
    store = GuardedStore(RedisStore(url), clock=time.time, options=GuardOptions(replicas=REPLICAS))
    await store.start()
    tokens = local = 0

    async def ask(worker: int, until: float) -> None:
        nonlocal tokens, local
        number = 0
        while time.monotonic() < until:
            number += 1
            answer = await store.reserve(Reservation(f"{replica}-{worker}-{number}", descriptors, Charge(1, 100)))
            local += answer.is_local
            if isinstance(answer, Reservation):
                store.settle(answer, Charge(1, 90))
                tokens += 90

    until = time.monotonic() + seconds
    await asyncio.gather(*(ask(worker, until) for worker in range(4)))
    await store.close()
    return tokens, local


def replica_process(url: str, replica: int, limit: int, seconds: float, results: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    results.put(uvloop.run(spend(url, replica, limit, seconds)))


def overshoot(url: str, limit: int, seconds: float) -> None:
    results: multiprocessing.Queue[tuple[int, int]] = multiprocessing.Queue()
    began = time.monotonic()
    processes = [
        multiprocessing.Process(target=replica_process, args=(url, n, limit, seconds, results)) for n in range(REPLICAS)
    ]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    elapsed = time.monotonic() - began
    tokens, local = (sum(column) for column in zip(*found, strict=True))
    allowed = limit * (1 + elapsed / 60)  # the burst, and the refill meanwhile
    over = max(0.0, tokens / allowed - 1)
    print(f"{REPLICAS} replicas, {limit:,} tokens a minute for {elapsed:.1f} s: let in {tokens:,} of {allowed:,.0f}")
    print(f"overshoot {over:.2%}, {local} answers from a local share")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url")
    options.add_argument("--requests", type=int, default=3000)
    options.add_argument("--seconds", type=float, default=5.0)
    chosen = options.parse_args()

    def run(url: str) -> None:
        uvloop.run(latencies(url, chosen.requests))
        overshoot(url, 20_000, chosen.seconds)

    if chosen.url:
        run(chosen.url)
    else:
        with a_redis() as server:
            run(server.url)


if __name__ == "__main__":
    main()
