"""Many routers on one real Redis: the messages, bytes and CPU that the model predicts, measured."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import uvloop

from benchmarks.scale_parts.redis_time import RedisTime
from benchmarks.scale_parts.site import Site, names
from tests.router.shared.store.parts import RedisServer

FIRST_S, SETTLING_S = 0.2, 3.0


class Load(NamedTuple):
    """`routers` in `processes` that serve `requests_per_s` together for `seconds`, with prompts of `blocks`.

    `cells` of equal size each have their part of the routers and `backends`.
    """

    routers: int
    backends: int
    requests_per_s: float
    blocks: int = 64
    busy_s: float = 2.0
    cells: int = 1
    learns: bool = True
    seconds: float = 15.0
    processes: int = 2


class Measured(NamedTuple):
    """What one run took, per second. `router` and `redis` are shares of a core, `late_s` are median and P99."""

    exchanges: float
    entries_written: float
    bytes_in: float
    bytes_out: float
    redis: float
    router: float
    late_s: tuple[float, float]
    served: float


def measure(server: RedisServer, load: Load) -> Measured:
    """Run `load`. What routers take without sharing is measured first, and subtracted."""
    alone = _run(server, load, shares=False)
    together = _run(server, load, shares=True)
    counted, spent = together[0], together[1]
    late = np.array(together[2] or [0.0])
    return Measured(
        counted["reads"] / load.seconds,
        counted["written"] / load.seconds,
        counted["in"] / load.seconds,
        counted["out"] / load.seconds,
        counted["cpu"] / load.seconds,
        (spent - alone[1]) / load.seconds / load.routers,
        (float(np.quantile(late, 0.5)), float(np.quantile(late, 0.99))),
        together[3] / load.seconds,
    )


def _run(server: RedisServer, load: Load, *, shares: bool) -> tuple[dict[str, float], float, Sequence[float], int]:
    """What Redis counted, the CPU seconds of all routers, the delays of their news, and the requests served."""
    server.clean()
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    gate = context.Barrier(load.processes + 1)
    shares_of = [range(first, load.routers, load.processes) for first in range(load.processes)]
    workers = [
        context.Process(target=_process, args=(server.url, load, list(mine), shares, gate, results))
        for mine in shares_of
    ]
    for worker in workers:
        worker.start()
    gate.wait()
    time.sleep(SETTLING_S)
    clock = RedisTime(server)
    clock.since()
    time.sleep(load.seconds)
    counted = clock.since()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    late = [delay for _, delays, _ in found for delay in delays]
    return counted, sum(spent for spent, _, _ in found), late, sum(served for *_, served in found)


def _process(url: str, load: Load, mine: Sequence[int], shares: bool, gate: Any, results: Any) -> None:
    results.put(uvloop.run(_routers(url, load, mine, shares, gate)))


async def _routers(
    url: str, load: Load, mine: Sequence[int], shares: bool, gate: Any
) -> tuple[float, Sequence[float], int]:
    backends = load.backends // load.cells
    sites = [Site(url, f"{number:032}", backends, load.learns, number % load.cells) for number in mine]
    if shares:
        await asyncio.gather(*(site.replicas.start() for site in sites))
    else:
        for site in sites:
            site.beliefs.share(lambda _: None)
    await asyncio.to_thread(gate.wait)
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(_clients(site, load, number)) for site, number in zip(sites, mine, strict=True)]
    await asyncio.sleep(SETTLING_S)
    for site in sites:
        site.late_s.clear()
    began, spent = loop.time(), time.process_time()
    await asyncio.sleep(load.seconds)
    spent, lasted = time.process_time() - spent, loop.time() - began
    late = [delay for site in sites for delay in site.late_s]
    for task in tasks:
        task.cancel()
    served = sum(result for result in await asyncio.gather(*tasks) if result)
    if shares:
        await asyncio.gather(*(site.replicas.close() for site in sites))
    return spent * load.seconds / lasted, late[:: max(1, len(late) // 5000)], served


async def _clients(site: Site, load: Load, number: int) -> int:
    """Send requests at one router's part of the rate until cancelled; returns how many after the settling."""
    rng, loop, served = random.Random(number), asyncio.get_running_loop(), 0
    backends, next_at = names(site.backends), loop.time()
    counts_from = next_at + SETTLING_S
    running: set[asyncio.Task[None]] = set()
    try:
        while True:
            next_at += rng.expovariate(load.requests_per_s / load.routers)
            await asyncio.sleep(max(0.0, next_at - loop.time()))
            keys = tuple(rng.getrandbits(64) for _ in range(load.blocks))
            work = site.serve(rng.choice(backends), keys, first_s=FIRST_S, busy_s=load.busy_s)
            task = asyncio.create_task(work)
            running.add(task)
            task.add_done_callback(running.discard)
            served += loop.time() >= counts_from
    except asyncio.CancelledError:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return served
