"""Prefixes of several routers, told through a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from router.beliefs import Beliefs
from router.prefixes.prefix import Dropped, Place, Prefix, prefix_id
from router.replicas.news import batches, decode, encode
from router.replicas.replicas import ReplicaOptions, Replicas
from router.replicas.shelf import RedisShelf
from router.replicas.stream import RedisStream
from tests.router.prefixes.parts import KEYS, Bench, a_bench
from tests.router.store.parts import RedisServer, a_redis
from tests.shards.attached import eventually

QUICK = ReplicaOptions(deadline_s=0.2, patience_s=0.5)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@asynccontextmanager
async def a_sharing(server: RedisServer, by: str) -> AsyncIterator[Bench]:
    async with a_bench(by=by) as bench:
        clock = asyncio.get_running_loop().time
        replicas = Replicas(
            RedisStream(server.url, by),
            RedisShelf(server.url),
            by,
            beliefs=Beliefs(lambda _: True, clock),
            cluster=bench.cluster,
            clock=clock,
            options=QUICK,
            on_prefix=bench.prefixes.hear,
        )
        bench.prefixes.share(replicas.tell)
        await replicas.start()
        try:
            yield bench
        finally:
            await replicas.close()


async def test_what_one_router_keeps_the_others_list_and_may_drop(server: RedisServer) -> None:
    async with a_sharing(server, "r1") as one, a_sharing(server, "r2") as other:
        prefix = await one.keep(shards=2)
        await eventually(lambda: [known.state for known in other.prefixes.of("acme")] == ["ready"])
        assert other.prefixes.get("acme", prefix.id) == one.prefixes.get("acme", prefix.id)
        await other.prefixes.drop("acme", prefix.id)
        await eventually(lambda: one.prefixes.of() == [])
        await eventually(lambda: not any(backend.pinned for backend in one.backends.values()))


def test_prefixes_travel_as_they_are() -> None:
    place = Place("own-0", "own", 640, 576, can_pin=True)
    prefix = Prefix(prefix_id(KEYS), "acme", "m", "acme", 640, 2, 1.5, 61.5, "r1", 2.5, places=(place,), trouble="x")
    told = [(0.0, prefix), (0.0, Dropped("acme", prefix.id))]
    (batch,) = batches(told, None, 1.0)
    assert [news for _, news in decode(encode(batch)).news] == [news for _, news in told]
