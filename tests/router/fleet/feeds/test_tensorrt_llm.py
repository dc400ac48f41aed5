"""A draining server over real HTTP, two routers, and one relay between them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from backends.events.nouns import CacheEvent
from router.fleet.feeds.health import FeedState
from router.fleet.feeds.options import FeedSpec
from router.fleet.feeds.relay import MemoryRelay, Relay
from router.fleet.feeds.sink import RankCache
from router.fleet.feeds.tensorrt_llm import TensorRTFeed
from tests.golden.event_encoders import Clear, Drop, Put
from tests.router.fleet.feeds.drained import Drained, a_server
from tests.router.fleet.feeds.fold import Fold
from tests.router.fleet.feeds.waiting import until

FIRST = Put((1, 2), None, (1, 2, 3, 4), 2)
SECOND = Put((3,), 2, (5, 6), 2)
CONTENTS = [(None, (1, 2)), (None, (1, 2, 3, 4)), (None, (1, 2, 3, 4, 5, 6))]


@asynccontextmanager
async def a_feed(
    server: Drained, fold: Fold, relay: Relay, *, owner: str = "a", **parts: Any
) -> AsyncIterator[TensorRTFeed]:
    spec = FeedSpec(RankCache("trt-0"), "tensorrt_llm", server.url)
    options: dict[str, Any] = {"poll_s": 0.005, "lease_s": 0.2, "rng": random.Random(3), **parts}
    feed = TensorRTFeed(spec, fold, relay=relay, owner=owner, **options)
    running = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def a_relay() -> MemoryRelay:
    return MemoryRelay(asyncio.get_running_loop().time)


def claims(fold: Fold) -> set[Any]:
    return set(fold.claims())


async def test_what_is_drained_is_known() -> None:
    fold = Fold()
    async with a_server() as server, a_feed(server, fold, a_relay()) as feed:
        server.tell([Clear(), FIRST, SECOND])
        await until(lambda: len(fold.claims()) == 3)
        server.tell([Drop((3,))])
        await until(lambda: claims(fold) == set(CONTENTS[:2]))
        (health,) = feed.health()
        assert (health.state, health.connected, health.confidence) == (FeedState.LIVE, True, 1.0)


async def test_one_router_drains_and_both_know() -> None:
    relay, folds = a_relay(), [Fold(), Fold()]
    async with a_server() as server, a_feed(server, folds[0], relay), a_feed(server, folds[1], relay, owner="b"):
        server.tell([Clear(), FIRST])
        await until(lambda: all(claims(fold) == set(CONTENTS[:2]) for fold in folds))


async def test_another_router_takes_over_and_the_gap_shows() -> None:
    relay, folds = a_relay(), [Fold(), Fold()]
    async with a_server() as server, a_feed(server, folds[1], relay, owner="b") as b:
        async with a_feed(server, folds[0], relay, owner="a"):
            server.tell([Clear(), FIRST])
            await until(lambda: all(fold.claims() for fold in folds))
        server.next_id += 5
        server.waiting = b"[]"
        server.tell([Put((9,), None, (7, 8), 2)])
        await until(lambda: claims(folds[1]) == {(None, (7, 8))})
        assert b.health()[0].counts.gaps == 1


async def test_a_former_holder_is_not_believed() -> None:
    relay, fold = a_relay(), Fold()
    async with a_server() as server, a_feed(server, fold, relay):
        server.tell([Clear(), FIRST])
        await until(lambda: bool(fold.claims()))
        await relay.publish("trt-0", 0, b'[{"event_id": 2, "data": {"type": "created"}}]')
        server.tell([SECOND])
        await until(lambda: claims(fold) == set(CONTENTS))


async def test_a_server_that_went_away_and_came_back_is_a_new_one() -> None:
    relay, fold = a_relay(), Fold()
    async with a_server() as server:
        feed = a_feed(server, fold, relay)
        heard = await feed.__aenter__()
        server.tell([Clear(), FIRST])
        await until(lambda: bool(fold.claims()))
    await until(lambda: not fold.claims())
    assert heard.health()[0].state is FeedState.EMPTY
    assert not heard.health()[0].connected
    async with a_server(urlsplit(server.url).port or 0) as again:
        again.tell([Clear(), SECOND, FIRST])
        await until(lambda: claims(fold) == set(CONTENTS[:2]))
        await feed.__aexit__(None, None, None)


async def test_a_status_that_is_no_answer_is_trouble() -> None:
    fold = Fold()
    async with a_server() as server, a_feed(server, fold, a_relay()) as feed:
        server.status = 404
        await until(lambda: "answered 404" in feed.health()[0].trouble)
        server.status = 200
        server.tell([Clear(), FIRST])
        await until(lambda: bool(fold.claims()) and not feed.health()[0].trouble)


async def test_while_the_engine_is_silent_all_routers_trust_their_blocks_less() -> None:
    relay, folds = a_relay(), [Fold(), Fold()]
    async with (
        a_server() as server,
        a_feed(server, folds[0], relay, lease_s=0.02) as a,
        a_feed(server, folds[1], relay, owner="b") as b,
    ):
        server.tell([Clear(), FIRST])
        await until(lambda: all(claims(fold) == set(CONTENTS[:2]) for fold in folds))
        server.status = 503
        await until(lambda: all(feed.health()[0].state is FeedState.GAP for feed in (a, b)))
        # keeping the lease is no word from the engine
        kept_until = relay._channels["trt-0"].expires_at
        await until(lambda: relay._channels["trt-0"].expires_at > kept_until)
        assert a.health()[0].confidence < 1
        assert all(claims(fold) == set(CONTENTS[:2]) for fold in folds)
        server.status = 200
        await until(lambda: all(feed.health()[0].state is FeedState.LIVE for feed in (a, b)))
        assert not a.health()[0].trouble
        server.tell([SECOND])
        await until(lambda: all(claims(fold) == set(CONTENTS) for fold in folds))


async def test_what_goes_wrong_in_hearing_ends_the_feed_for_its_owner_to_begin_it_again() -> None:
    class Broken(Fold):
        def hear(self, source: RankCache, event: CacheEvent) -> None:
            raise ArithmeticError("a mistake of ours")

    async with a_server() as server:
        spec = FeedSpec(RankCache("trt-0"), "tensorrt_llm", server.url)
        feed = TensorRTFeed(spec, Broken(), relay=a_relay(), owner="a", poll_s=0.005)
        server.tell([Clear(), FIRST])
        with pytest.raises(ArithmeticError):
            async with asyncio.timeout(5):
                await feed.run()


async def test_a_drain_that_cannot_be_read_clears_what_was_known() -> None:
    fold = Fold()
    async with a_server() as server, a_feed(server, fold, a_relay()) as feed:
        server.tell([Clear(), FIRST])
        await until(lambda: bool(fold.claims()))
        server.waiting = b'{"not": "a list"}'
        await until(lambda: not fold.claims())
        assert feed.health()[0].counts.undecodable == 1


async def test_an_event_without_a_number_clears_what_was_known() -> None:
    fold = Fold()
    async with a_server() as server, a_feed(server, fold, a_relay()):
        server.tell([Clear(), FIRST])
        await until(lambda: bool(fold.claims()))
        server.waiting = b'[{"data": {"type": "removed", "block_hashes": [1]}}]'
        await until(lambda: not fold.claims())


async def test_ranks_are_sources_of_their_own() -> None:
    fold = Fold()
    async with a_server() as server, a_feed(server, fold, a_relay()) as feed:
        server.tell([FIRST], rank=0)
        await until(lambda: server.waiting == b"[]")
        server.next_id = 0
        server.tell([FIRST], rank=1)
        await until(lambda: len(feed.health()) == 2)
        assert [str(health.source) for health in feed.health()] == ["trt-0", "trt-0/1"]


async def test_without_the_relay_what_is_known_only_gets_old() -> None:
    class Unreachable(MemoryRelay):
        is_away = False

        async def claim(self, channel: str, owner: str, ttl_s: float) -> int | None:
            if self.is_away:
                raise ConnectionError("redis is gone")
            return await super().claim(channel, owner, ttl_s)

    relay, fold = Unreachable(asyncio.get_running_loop().time), Fold()
    async with a_server() as server, a_feed(server, fold, relay, lease_s=0.02) as feed:
        server.tell([Clear(), FIRST])
        await until(lambda: bool(fold.claims()))
        relay.is_away = True
        await until(lambda: feed.health()[0].state is FeedState.GAP)
        assert "redis is gone" in feed.health()[0].trouble
        assert claims(fold) == set(CONTENTS[:2])
        relay.is_away = False
        server.tell([SECOND])
        await until(lambda: claims(fold) == set(CONTENTS))
        assert feed.health()[0].state is FeedState.LIVE


async def test_it_ends_although_the_relay_is_away() -> None:
    class Leaving(MemoryRelay):
        async def release(self, channel: str, owner: str) -> None:
            raise ConnectionError("redis is gone")

    fold = Fold()
    async with a_server() as server:
        spec = FeedSpec(RankCache("trt-0"), "tensorrt_llm", server.url)
        feed = TensorRTFeed(spec, fold, relay=Leaving(asyncio.get_running_loop().time), owner="a", poll_s=0.005)
        running = asyncio.create_task(feed.run())
        server.tell([Clear(), FIRST])
        await until(lambda: bool(fold.claims()))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
