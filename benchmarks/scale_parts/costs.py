"""Unit costs of routers that share, measured with the router's own parts on a real Redis."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from backends.fake import FakeBackend
from benchmarks.scale_parts.model import Costs
from benchmarks.scale_parts.redis_time import RedisTime
from benchmarks.scale_parts.site import Site, names
from policies.nouns import Limits
from policies.prefix.index import PrefixIndex
from policies.prefix.residency import Residency
from policies.quota.budget import Charge, Descriptor, Reservation
from router.fleet.belief_news import Learnt, Sent
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Traffic
from router.fleet.prompt_keys import PromptKeys
from router.shared.replicas.news import Batch, decode, encode
from router.shared.replicas.peers import Peers
from router.shared.replicas.stream import START, RedisStream
from router.shared.store.redis import CONNECTIONS, RedisStore
from tests.router.shared.store.parts import RedisServer, owed

ROUNDS = 300
NEVER = "99999999999999-0"
"""A position after all entries."""


def keys(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.getrandbits(64) for _ in range(count))


def seconds_of(work: Callable[[], object], times: int = 1) -> float:
    """Seconds of this thread on a core for each of the `times` that `work` does the same."""
    gc.collect()
    began = time.thread_time()
    work()
    return (time.thread_time() - began) / times


async def measured(server: RedisServer) -> Costs:
    """All unit costs."""
    server.clean()
    rng, costs = random.Random(1), dict[str, float]()
    costs |= await _exchanges(server)
    server.clean()
    costs |= await _redis(server)
    server.clean()
    costs |= await _quotas(server)
    costs |= _news(rng) | _changes() | _lookups(rng) | _memory(rng)
    return Costs(**costs)


async def _exchanges(server: RedisServer) -> dict[str, float]:
    """A router's side of an exchange: empty, for each backend, with an entry to write, and for each entry read."""
    few, many = Site(server.url, "few", 10), Site(server.url, "many", 2010)
    writer = RedisStream(server.url, "writer")
    for site in (few, many):
        await site.replicas.turn()
    turn_s = await _each(few.replicas.turn)
    scan_s = (await _each(many.replicas.turn) - turn_s) / 2000
    quiet = encode(Batch((), None, {}))

    async def written() -> None:
        await writer.exchange([quiet], NEVER)

    async def nothing() -> None:
        await writer.exchange([], NEVER)

    write_s = await _each(written) - await _each(nothing)
    await few.replicas.turn()
    while await few.replicas.turn():
        pass
    # eight entries at a time, as with nine routers
    spent = 0.0
    for _ in range(ROUNDS):
        await writer.exchange([quiet] * 8, NEVER)
        began = time.thread_time()
        await few.replicas.turn()
        spent += time.thread_time() - began
    for site in (few, many):
        await site.replicas.close()
    await writer.close()
    return {
        "turn_s": turn_s,
        "scan_s": max(0.0, scan_s),
        "write_s": max(0.0, write_s),
        "entry_s": max(0.0, spent / ROUNDS - turn_s) / 8,
    }


async def _each(act: Callable[[], Awaitable[object]]) -> float:
    began = time.thread_time()
    for _ in range(ROUNDS):
        await act()
    return (time.thread_time() - began) / ROUNDS


async def _redis(server: RedisServer) -> dict[str, float]:
    """Redis' side, by the number of entries and bytes; and the bytes of an entry beside its payload."""
    stream, clock = RedisStream(server.url, "x" * 32), RedisTime(server)

    async def cpu(payloads: Sequence[bytes], after: str) -> tuple[float, float, float]:
        await stream.exchange([], NEVER)
        clock.since()
        for _ in range(ROUNDS):
            await stream.exchange(payloads, after)
        grown = clock.since()
        return grown["cpu"] / ROUNDS, grown["in"] / ROUNDS, grown["out"] / ROUNDS

    exchange_s, empty_in, empty_out = await cpu([], NEVER)
    small, large = bytes(100), bytes(20_100)
    few_s, few_in, _ = await cpu([small] * 8, NEVER)
    many_s, _, _ = await cpu([large] * 8, NEVER)
    in_byte_s = (many_s - few_s) / (8 * 20_000)
    entry_bytes = (few_in - empty_in) / 8 - 100
    read: dict[int, tuple[float, float]] = {}
    for size in (100, 20_100):
        server.clean()
        for _ in range(8):
            await stream.exchange([bytes(size)], NEVER)
        took_s, _, out = await cpu([], START)
        read[size] = took_s, out - empty_out
    out_byte_s = max(0.0, (read[20_100][0] - read[100][0]) / (read[20_100][1] - read[100][1]))
    server.clean()
    await stream.exchange([small] * 64, NEVER)
    full_s, _, full_out = await cpu([], START)
    await stream.close()
    return {
        "redis_exchange_s": exchange_s,
        "redis_write_s": max(0.0, (few_s - exchange_s) / 8 - in_byte_s * (entry_bytes + 100)),
        "redis_read_s": max(0.0, (full_s - exchange_s - out_byte_s * (full_out - empty_out)) / 64),
        "redis_in_byte_s": max(0.0, in_byte_s),
        "redis_out_byte_s": out_byte_s,
        "entry_bytes": entry_bytes,
        "exchange_in_bytes": empty_in,
        "exchange_out_bytes": empty_out,
    }


async def _quotas(server: RedisServer) -> dict[str, float]:
    """Reserving and settling, with limits of requests and tokens per minute, of a router and of Redis.

    As many requests at once as a router has connections: a Redis that is asked by many serves several at a time.
    """
    store, clock = RedisStore(server.url), RedisTime(server)
    wide = (Descriptor("bench", Limits(10**9, 10**9)),)

    async def request(number: int) -> None:
        asked = await store.reserve(Reservation(str(number), wide, Charge(1, 1000)))
        assert isinstance(asked, Reservation)
        await store.settle_all([owed(asked, Charge(1, 900))])

    async def requests(first: int) -> None:
        for number in range(first, 3 * ROUNDS, CONNECTIONS):
            await request(number)

    await request(-1)
    clock.since()
    began = time.thread_time()
    await asyncio.gather(*map(requests, range(CONNECTIONS)))
    spent, grown = time.thread_time() - began, clock.since()
    await store.close()
    return {"quota_s": spent / ROUNDS / 3, "redis_quota_s": grown["cpu"] / ROUNDS / 3}


def _news(rng: random.Random) -> dict[str, float]:
    """Decoding and taking over the news of another router, of prompts of 16 and of 192 blocks."""
    heard, sizes = dict[tuple[str, int], float](), dict[tuple[str, int], int]()
    for blocks in (16, 64, 192):
        prompts = [keys(rng, blocks) for _ in range(500)]
        told: list[Sent | Learnt] = []
        teller = Beliefs(lambda _: True, lambda: 1.0)
        teller.share(told.append)  # type: ignore[arg-type]
        for number, prompt in enumerate(prompts):
            teller.sent(f"own-{number % 100}", PromptKeys(prompt))
        learnt = [Learnt(f"own-{n % 100}", prompt, blocks, 4, 0.8, 1.0, True) for n, prompt in enumerate(prompts)]
        for kind, news in (("sent", told), ("learnt", learnt)):
            payloads = [encode(Batch(((1, each),))) for each in news]  # type: ignore[arg-type]
            sizes[kind, blocks] = len(payloads[0])
            beliefs = Beliefs(lambda _, kind=kind: kind == "sent", lambda: 1.0)  # type: ignore[misc]

            def hear(payloads: list[bytes] = payloads, beliefs: Beliefs = beliefs) -> None:
                for payload in payloads:
                    for _, each in decode(payload).news:
                        beliefs.hear(each, 1.0)  # type: ignore[arg-type]

            heard[kind, blocks] = seconds_of(hear, len(payloads))
    block_s = (heard["learnt", 192] - heard["learnt", 16]) / 176
    block_bytes = (sizes["learnt", 192] - sizes["learnt", 16]) / 176
    return {
        "sent_s": heard["sent", 64],
        "learnt_s": max(0.0, heard["learnt", 16] - 16 * block_s),
        "learnt_block_s": block_s,
        "sent_bytes": float(sizes["sent", 64]),
        "learnt_bytes": sizes["learnt", 16] - 16 * block_bytes,
        "learnt_block_bytes": block_bytes,
    }


def _changes() -> dict[str, float]:
    """Decoding a change of another router's requests at one backend, and adding up that backend."""
    cluster, peers = Cluster([FakeBackend(name) for name in names(500)]), Peers(silent_s=1e9)
    for router in range(8):
        peers.hear(str(router), {name: Traffic(1 + router, 1, 100) for name in names(500)}, {}, 0.0)
    peers.changed()
    payloads = [encode(Batch((), None, {name: Traffic(9, 2, 4000, 8e6)})) for name in names(500)]

    def hear() -> None:
        for payload in payloads:
            peers.hear("3", None, decode(payload).changes, 1.0)
        cluster.hear_elsewhere(peers.changed())

    change_bytes = len(payloads[-1]) - len(encode(Batch((), None, {})))
    return {"change_s": seconds_of(hear, len(payloads)), "change_bytes": float(change_bytes)}


def _lookups(rng: random.Random) -> dict[str, float]:
    """Looking up a prompt in the learned blocks of 500 backends, of which none or eight hold a part of it."""
    residency, prompts = Residency(), [keys(rng, 64) for _ in range(50)]
    for name in names(500):
        residency.sent(name, keys(rng, 64), 1.0)
    for prompt in prompts:
        for name in rng.sample(names(500), 8):
            residency.sent(name, prompt[:24], 1.0)
    unknown = [keys(rng, 64) for _ in range(50)]

    def look_up(these: Sequence[tuple[int, ...]]) -> None:
        for prompt in these:
            residency.longest(prompt, 1.0)

    none_s, held_s = seconds_of(lambda: look_up(unknown), 50), seconds_of(lambda: look_up(prompts), 50)
    return {"lookup_s": none_s / 500, "holder_s": (held_s - none_s) / 8}


def _memory(rng: random.Random) -> dict[str, float]:
    """Memory of a backend with nothing known, and of a block that one backend holds; time of a block's event."""
    index, blocks = PrefixIndex(), [keys(rng, 16) for _ in range(20_000)]
    count = sum(map(len, blocks))

    def stored() -> None:
        for number, some in enumerate(blocks):
            index.store(f"own-{number % 100}", some)

    block_s = seconds_of(stored, count)
    residency = Residency()
    for number, some in enumerate(blocks):
        residency.sent(f"own-{number % 20}", some, 1.0)
    known = index.size_bytes() + residency.size_bytes()
    tracemalloc.start()
    cluster = Cluster([FakeBackend(name) for name in names(500)])
    backend_bytes = tracemalloc.get_traced_memory()[0] / 500
    tracemalloc.stop()
    del cluster
    resident = 0.0
    with suppress(FileNotFoundError), Path("/proc/self/status").open() as status:
        lines = dict(line.split(":", 1) for line in status if ":" in line)
        resident = 1024.0 * int(lines["VmRSS"].split()[0]) - known
    return {
        "event_block_s": block_s,
        "backend_bytes": backend_bytes,
        "indexed_block_bytes": index.size_bytes() / count,
        "learnt_known_block_bytes": residency.size_bytes() / count,
        "base_bytes": resident,
    }
