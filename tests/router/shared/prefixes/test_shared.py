"""Prefixes of several routers, shared through a real Redis."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from backends.fake import FakeBackend
from policies.errors import UnknownPrefix
from router.fleet.beliefs import Beliefs
from router.shared.prefixes.prefix import Dropped, Place, Prefix, prefix_id
from router.shared.replicas.news import batches, decode, encode
from router.shared.replicas.replicas import ReplicaOptions, Replicas
from router.shared.replicas.shelf import RedisShelf
from router.shared.replicas.stream import RedisStream
from tests.router.shared.prefixes.parts import KEYS, Bench, a_bench
from tests.router.shared.store.parts import RedisServer, a_redis
from tests.shards.attached import eventually

QUICK = ReplicaOptions(deadline_s=0.2, patience_s=0.5)


@pytest.fixture(scope="module")
def running_server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture
def server(running_server: RedisServer) -> RedisServer:
    """A Redis without the news of earlier tests, which are of the same prefix."""
    with running_server.admin() as admin:
        admin.flushall()
    return running_server


@asynccontextmanager
async def a_sharing(server: RedisServer, by: str, *backends: FakeBackend) -> AsyncIterator[Bench]:
    async with a_bench(*backends, by=by) as bench:
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
        bench.prefixes.share(replicas.tell, replicas.catch_up)
        await replicas.start()
        try:
            yield bench
        finally:
            await replicas.close()


async def test_what_one_router_keeps_the_others_list_and_may_drop(server: RedisServer) -> None:
    async with a_sharing(server, "r1") as first, a_sharing(server, "r2") as second:
        prefix = await first.keep(shards=2)
        await eventually(lambda: [known.state for known in second.prefixes.of("acme")] == ["ready"])
        assert second.prefixes.get("acme", prefix.id) == first.prefixes.get("acme", prefix.id)
        await second.prefixes.drop("acme", prefix.id)
        await eventually(lambda: first.prefixes.of() == [])
        await eventually(lambda: not any(backend.pinned for backend in first.backends.values()))


@dataclass(slots=True, eq=False)
class SlowToUnpin(FakeBackend):
    """A shard that unpins when the test allows it."""

    may_unpin: asyncio.Event = field(default_factory=asyncio.Event)

    async def unpin(self, name: str) -> int:
        """See CacheKeeper."""
        await self.may_unpin.wait()
        return await FakeBackend.unpin(self, name)


def some_shards() -> list[FakeBackend]:
    return [FakeBackend(f"b{number}", pins=True) for number in range(3)]


def agree(*routers: Bench) -> bool:
    """Do all list the same, and is exactly that pinned?"""
    first, *others = [router.prefixes.of() for router in routers]
    wanted = {(place.backend, prefix.pin) for prefix in first for place in prefix.places}
    pinned = {(name, pin) for name, backend in routers[0].backends.items() for pin in backend.pinned}
    return (
        all(other == first for other in others) and wanted == pinned and not any(prefix.is_warming for prefix in first)
    )


async def test_a_drop_at_one_router_and_a_later_request_at_another_keep_it(server: RedisServer) -> None:
    shards = some_shards()
    async with a_sharing(server, "r1", *shards) as first, a_sharing(server, "r2", *shards) as second:
        for _ in range(5):
            prefix = await first.keep(shards=2)
            await second.prefixes.caught_up()
            assert second.prefixes.get("acme", prefix.id).state == "ready"
            await second.prefixes.drop("acme", prefix.id)
            await first.prefixes.caught_up()
            assert first.prefixes.of() == []
            await first.keep()
            await second.keep()
            await first.prefixes.drop("acme", prefix.id)
            prefix = await second.keep()
            await eventually(lambda: agree(first, second))
            assert first.prefixes.get("acme", prefix.id).state == "ready"
            await second.prefixes.drop("acme", prefix.id)


async def test_a_drop_and_a_request_at_once_end_either_way_and_all_routers_agree(server: RedisServer) -> None:
    shards = some_shards()
    async with a_sharing(server, "r1", *shards) as first, a_sharing(server, "r2", *shards) as second:
        for number in range(20):
            prefix = await first.keep()
            dropping, keeping = first.prefixes.drop("acme", prefix.id), second.keep(shards=1 + number % 3)
            calls = (dropping, keeping) if number % 2 else (keeping, dropping)
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert result is None or isinstance(result, Prefix | UnknownPrefix), repr(result)
            await eventually(lambda: agree(first, second))
            assert [left.state for left in first.prefixes.of()] in ([], ["ready"])


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_three_routers_are_asked_within_a_moment_they_agree_and_no_pin_is_left(
    server: RedisServer, seed: int
) -> None:
    rng, shards = random.Random(seed), some_shards()
    async with (
        a_sharing(server, "r1", *shards) as first,
        a_sharing(server, "r2", *shards) as two,
        a_sharing(server, "r3", *shards) as three,
    ):

        async def ask(router: Bench, after_s: float, count: int) -> None:
            await asyncio.sleep(after_s)
            with suppress(UnknownPrefix):
                if count:
                    await router.keep(shards=count)
                else:
                    await router.prefixes.drop("acme", prefix_id(KEYS))

        for _ in range(10):
            calls = [(rng.choice((first, two, three)), 0.04 * rng.random(), rng.choice((0, 0, 1, 2, 3)))]
            calls += [(rng.choice((first, two, three)), 0.04 * rng.random(), rng.choice((0, 1, 3))) for _ in range(3)]
            await asyncio.gather(*(ask(*call) for call in calls))
            await eventually(lambda: agree(first, two, three))


async def test_two_routers_that_are_asked_for_one_at_once_end_with_one_that_looks_after_it(server: RedisServer) -> None:
    shards = some_shards()
    async with a_sharing(server, "r1", *shards) as first, a_sharing(server, "r2", *shards) as second:
        await asyncio.gather(first.keep(shards=1, ttl_s=900.0), second.keep(shards=2, ttl_s=60.0))
        await eventually(lambda: agree(first, second) and first.prefixes.of()[0].shards == 2)
        (prefix,) = first.prefixes.of()
        assert (prefix.expires_at, prefix.state) == (1900.0, "ready")
        assert len(first.prefixes._charges) + len(second.prefixes._charges) == 1


async def test_a_shard_that_is_slow_to_let_go_keeps_what_was_asked_for_since(server: RedisServer) -> None:
    shard = SlowToUnpin("b0", pins=True)
    async with a_sharing(server, "r1", shard) as first, a_sharing(server, "r2", shard) as second:
        prefix = await first.keep()
        await eventually(lambda: len(second.prefixes.of()) == 1)
        dropping = asyncio.create_task(first.prefixes.drop("acme", prefix.id))
        await eventually(lambda: second.prefixes.of() == [])
        await second.keep()
        shard.may_unpin.set()
        await dropping
        await eventually(lambda: agree(first, second))
        assert len(first.prefixes.of()) == 1


async def test_a_router_that_is_asked_before_it_learns_of_an_earlier_drop_pins_it_anew() -> None:
    shard = SlowToUnpin("b0", pins=True)
    async with a_bench(shard) as bench, a_bench(shard, by="r2") as other:
        prefix = await bench.keep()
        other.prefixes.hear(bench.shared[-1])
        other.index.store("b0", KEYS)
        dropping = asyncio.create_task(bench.prefixes.drop("acme", prefix.id))
        await eventually(lambda: isinstance(bench.shared[-1], Dropped))
        other.pass_s(0.001)
        await other.keep()
        shard.may_unpin.set()
        await dropping
        other.prefixes.hear(bench.shared[-1])
        await other.turn()
        for news in other.shared:
            bench.prefixes.hear(news)
        assert agree(bench, other)
        assert [kept.state for kept in bench.prefixes.of()] == ["ready"]


def test_prefixes_travel_as_they_are() -> None:
    place = Place("own-0", "own", 640, 576, can_pin=True)
    prefix = Prefix(prefix_id(KEYS), "acme", "m", "acme", 640, 2, 1.5, 61.5, "r1", 2.5, places=(place,), trouble="x")
    timed = [(0.0, prefix), (0.0, Dropped("acme", prefix.id))]
    (batch,) = batches(timed, None, 1.0)
    assert [news for _, news in decode(encode(batch)).news] == [news for _, news in timed]
