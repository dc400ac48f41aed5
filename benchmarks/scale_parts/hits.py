"""Hit rate by the age of shared knowledge, the number of routers and backends, and by cells; on a virtual clock.

Whole gateways send growing conversations to simulated shards. Their exchange is the real one on a stream in memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from benchmarks.simulated_shards import Cache, SimulatedCaller, SimulatedShard, a_config
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.shared.replicas.replicas import ReplicaOptions, Replicas
from router.shared.replicas.stream import AT_ONCE, START, Entry, Exchanged, StreamState, is_after
from router.start.build import build
from shards.kv.keys import BLOCK_TOKENS, block_keys
from simulation.virtual_time import run_virtually

SYSTEM_BLOCKS, TURNS, TURN_BLOCKS, NEW_TOKENS = 24, 6, (2, 10), 64
Kept = Literal["tenant", "conversation", "nothing"]

THINK_S, PREFIX_OF = 2.0, 8
"""Mean pause between turns; and conversations that share a system prompt."""
PER_BACKEND_PER_S = 0.5
"""Requests that each backend gets per second."""
CACHE_BLOCKS = 4096


class Setup(NamedTuple):
    """One run: `cells` of equal size, each with its part of the `routers` and `backends`.

    A cell gets all conversations of a tenant (they share a system prompt), single conversations, or turns of any, as
    `kept` says. News are exchanged `every_s`; None: never.
    """

    routers: int
    backends: int
    cells: int = 1
    kept: Kept = "tenant"
    every_s: float | None = 0.015
    requests: int = 2000


class Hits(NamedTuple):
    """The hit rate, as a share of that of an endless cache too, and the number of failed requests."""

    rate: float
    of_ideal: float
    failed: int


class Turn(NamedTuple):
    """One request of a conversation."""

    at_s: float
    conversation: int
    tokens: bytes


@dataclass
class MemoryStream:
    """A Stream in memory that all routers of a cell share; `by` is the writer's name."""

    entries: list[Entry]
    by: str

    async def state(self) -> StreamState:
        """See Stream."""
        if not self.entries:
            return StreamState()
        return StreamState(self.entries[0].number, self.entries[-1].number)

    async def exchange(self, payloads: Sequence[bytes], after: str) -> Exchanged:
        """See Stream."""
        now_ms = round(asyncio.get_running_loop().time() * 1000)
        for payload in payloads:
            self.entries.append(Entry(f"{now_ms}-{len(self.entries) + 1}", now_ms, self.by, payload))
        begin = len(self.entries)
        while begin and (after == START or is_after(self.entries[begin - 1].number, after)):
            begin -= 1
        return Exchanged(self.entries[begin : begin + AT_ONCE], now_ms)

    async def close(self) -> None:
        """See Stream."""


class NoShelf:
    """A Shelf without a snapshot, that keeps none."""

    async def claim(self, by: str, for_s: float) -> bool:  # noqa: ARG002
        """See Shelf."""
        return False

    async def append(self, name: str, pieces: Sequence[bytes]) -> None:
        """See Shelf."""

    async def publish(self, name: str, header: bytes, by: str) -> bytes | None:  # noqa: ARG002
        """See Shelf."""
        return None

    async def outdate(self, name: str) -> None:
        """See Shelf."""

    async def header(self) -> bytes | None:
        """See Shelf."""
        return None

    async def pieces(self, name: str, start: int, count: int) -> Sequence[bytes]:  # noqa: ARG002
        """See Shelf."""
        return ()

    async def close(self) -> None:
        """See Shelf."""


@dataclass
class Cell:
    """Routers that share news, and the caches of their backends."""

    caches: list[Cache]
    gateways: list[Gateway] = field(default_factory=list)


def conversations(count: int, per_s: float) -> list[Turn]:
    """`count` turns of conversations that begin evenly, `per_s` turns a second, and grow by a few blocks each."""
    rng, turns = random.Random(3), list[Turn]()
    talks = count // TURNS
    for number in range(talks):
        at_s = number * TURNS / per_s
        tokens = _filled(number // PREFIX_OF, SYSTEM_BLOCKS)
        for turn in range(TURNS):
            tokens += _filled(1_000_000 + number * TURNS + turn, rng.randint(*TURN_BLOCKS))
            turns.append(Turn(at_s, number, tokens))
            at_s += 0.5 + rng.expovariate(1 / THINK_S)
    return sorted(turns)


def hits(setup: Setup) -> Hits:
    """The result of one run."""
    return run_virtually(_run(setup))


async def _run(setup: Setup) -> Hits:
    turns = conversations(setup.requests, PER_BACKEND_PER_S * setup.backends)
    cells = [_cell(setup, number) for number in range(setup.cells)]
    loop, rng = asyncio.get_running_loop(), random.Random(5)
    exchanges = [gateway.replicas for cell in cells for gateway in cell.gateways if gateway.replicas is not None]
    for replicas in exchanges:
        await replicas.start()

    async def ask(number: int, turn: Turn) -> None:
        await asyncio.sleep(turn.at_s - loop.time())
        places = {
            "tenant": turn.conversation // PREFIX_OF,
            "conversation": turn.conversation,
            "nothing": rng.getrandbits(32),
        }
        cell = cells[places[setup.kept] % len(cells)]
        await serve(SimulatedCaller(str(number), turn.tokens, NEW_TOKENS), rng.choice(cell.gateways))

    done = await asyncio.gather(*(ask(*numbered) for numbered in enumerate(turns)), return_exceptions=True)
    for replicas in exchanges:
        await replicas.close()
    for cell in cells:
        for gateway in cell.gateways:
            await gateway.tokenizers.close()
    caches = [cache for cell in cells for cache in cell.caches]
    rate = sum(cache.hit_blocks for cache in caches) / max(1, sum(cache.asked_blocks for cache in caches))
    return Hits(rate, rate / _ideal(turns), sum(result is not None for result in done))


def _cell(setup: Setup, number: int) -> Cell:
    count, loop = setup.backends // setup.cells, asyncio.get_running_loop()
    cell = Cell([Cache(f"own-{number}-{place}", CACHE_BLOCKS) for place in range(count)])
    entries: list[Entry] = []
    for router in range(setup.routers // setup.cells):
        shards = [SimulatedShard(cache, tells=False) for cache in cell.caches]
        seed = random.Random(number * 1000 + router)
        gateway = build(a_config(), backends=lambda _, mine=shards: mine, clock=loop.time, rng=seed).gateway
        # neither probes nor timeouts: they would be most of the work of a large fleet that never fails
        for member in gateway.cluster._members.values():
            member.probed(None, now=loop.time())
        if setup.every_s is not None:
            by = f"{number}-{router}"
            options = ReplicaOptions(every_s=setup.every_s, at_full_pace=10**6)
            gateway.replicas = Replicas(
                MemoryStream(entries, by),
                NoShelf(),
                by,
                beliefs=gateway.beliefs,
                cluster=gateway.cluster,
                clock=loop.time,
                options=options,
            )
        cell.gateways.append(gateway)
    return cell


def _ideal(turns: Sequence[Turn]) -> float:
    """The hit rate of one endless cache."""
    cache = Cache("ideal", 10**9)
    for turn in turns:
        cache.take(block_keys(turn.tokens, 0))
    return cache.hit_blocks / cache.asked_blocks


def _filled(seed: int, blocks: int) -> bytes:
    return np.full(blocks * BLOCK_TOKENS, seed, np.uint32).tobytes()
