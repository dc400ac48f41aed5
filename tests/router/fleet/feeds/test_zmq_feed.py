"""Feeds over real sockets on this machine. The engine behind them is a stand-in; its bytes are the engines' own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import zmq.asyncio

from backends.events import sglang, vllm
from router.fleet.feeds.health import FeedHealth, FeedState
from router.fleet.feeds.options import FeedSpec
from router.fleet.feeds.sink import RankCache
from router.fleet.feeds.zmq_feed import Patience, ZmqDialect, ZmqFeed
from tests.golden.event_encoders import SGLANG, VLLM
from tests.router.fleet.feeds.engine import Engine
from tests.router.fleet.feeds.fold import Fold
from tests.router.fleet.feeds.publisher import Publisher, a_publisher, subscribed
from tests.router.fleet.feeds.waiting import until

QUICK = Patience(connect_s=2.0, replay_s=0.3, tick_s=0.02, first_backoff_s=0.01, longest_backoff_s=0.05)
VLLM_DIALECT = ZmqDialect(vllm.decode)


def an_engine(version: str = "vllm-0.26", seed: int = 1, **fields: Any) -> Engine:
    return Engine(encode=(VLLM | SGLANG)[version], rng=random.Random(seed), **fields)


def a_spec(publisher: Publisher, **fields: Any) -> FeedSpec:
    return replace(FeedSpec(RankCache("vllm-0"), "vllm", publisher.events, publisher.replay, "kv@"), **fields)


@asynccontextmanager
async def a_feed(spec: FeedSpec, fold: Fold, **parts: Any) -> AsyncIterator[ZmqFeed]:
    context = zmq.asyncio.Context()
    options: dict[str, Any] = {"dialect": VLLM_DIALECT, "patience": QUICK, "rng": random.Random(7), **parts}
    feed = ZmqFeed(spec, fold, context=context, **options)
    running = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        context.destroy(linger=0)


def health(feed: ZmqFeed) -> FeedHealth:
    return feed.health()[0]


@pytest.mark.parametrize("with_topic", [False, True])
async def test_a_feed_hears_what_was_before_it_and_what_comes(with_topic: bool) -> None:
    engine, fold = an_engine(), Fold()
    async with a_publisher() as publisher:
        publisher.with_topic = with_topic
        for _ in range(10):
            await publisher.send(engine.step(), loses=True)
        async with a_feed(a_spec(publisher), fold) as feed:
            await subscribed(publisher)
            for _ in range(10):
                await publisher.send(engine.step())
            await until(lambda: feed._heard.tracker.applied == 19)
            await until(lambda: health(feed).state is FeedState.LIVE)
            assert fold.claims() == frozenset(engine.held)
            assert health(feed).connected
            assert health(feed).confidence == 1.0
            assert publisher.asked[0] == 0


async def test_a_message_that_was_lost_is_asked_for() -> None:
    engine, fold = an_engine(), Fold()
    async with a_publisher() as publisher, a_feed(a_spec(publisher), fold) as feed:
        await subscribed(publisher)
        await publisher.send(engine.step())
        await until(lambda: health(feed).state is FeedState.LIVE)
        for number in range(1, 12):
            await publisher.send(engine.step(), loses=number in (4, 5, 9))
        await until(lambda: feed._heard.tracker.applied == 11 and health(feed).state is FeedState.LIVE)
        assert fold.claims() == frozenset(engine.held)
        assert health(feed).counts.gaps >= 1


async def test_without_replay_a_gap_clears_and_what_comes_counts() -> None:
    engine, fold = an_engine(), Fold()
    async with a_publisher() as publisher, a_feed(a_spec(publisher, replay=None), fold) as feed:
        await subscribed(publisher)
        for number in range(8):
            await publisher.send(engine.step(), loses=number == 5)
        await until(lambda: feed._heard.tracker.applied == 7)
        assert fold.claims() <= frozenset(engine.held)
        assert (health(feed).counts.gaps, health(feed).counts.cleared) == (1, 1)
        assert publisher.asked == []


async def test_an_engine_that_was_restarted_holds_nothing_of_before() -> None:
    engine, fold = an_engine(), Fold()
    async with a_publisher() as first:
        spec = a_spec(first)
        context = a_feed(spec, fold)
        feed = await context.__aenter__()
        await subscribed(first)
        for _ in range(10):
            await first.send(engine.step())
        await until(lambda: feed._heard.tracker.applied == 9)
        before = fold.claims()
    assert before
    await until(lambda: not health(feed).connected)
    assert health(feed).state is FeedState.GAP
    assert health(feed).confidence < 1.0
    engine.restart()
    async with a_publisher(spec.events, spec.replay or "") as second:
        for _ in range(3):
            await second.send(engine.step(), loses=True)
        await until(lambda: health(feed).connected and health(feed).state is FeedState.LIVE)
        assert fold.claims() == frozenset(engine.held)
        assert health(feed).counts.restarts >= 1
    await context.__aexit__(None, None, None)


async def test_an_unanswered_replay_clears_the_known_blocks() -> None:
    engine, fold = an_engine(), Fold()
    async with a_publisher() as publisher, a_feed(a_spec(publisher), fold) as feed:
        publisher.answers = False
        await subscribed(publisher)
        await until(lambda: bool(publisher.asked))
        for number in range(8):
            await publisher.send(engine.step(), loses=number == 5)
        await until(lambda: feed._heard.tracker.applied == 7 and health(feed).state is FeedState.LIVE)
        assert fold.claims() <= frozenset(engine.held)
        assert "did not replay missed messages" in health(feed).trouble


async def test_a_quiet_engine_is_asked_whether_that_was_all() -> None:
    engine, fold = an_engine(), Fold()
    patience = replace(QUICK, check_every_s=0.05)
    async with a_publisher() as publisher, a_feed(a_spec(publisher), fold, patience=patience) as feed:
        await subscribed(publisher)
        await publisher.send(engine.step())
        await until(lambda: feed._heard.tracker.applied == 0)
        await publisher.send(engine.step(), loses=True)
        await until(lambda: feed._heard.tracker.applied == 1 and health(feed).state is FeedState.LIVE)
        assert fold.claims() == frozenset(engine.held)


async def test_messages_of_another_shape_are_counted_and_do_no_harm() -> None:
    engine, fold = an_engine(), Fold()
    async with a_publisher() as publisher, a_feed(a_spec(publisher), fold) as feed:
        await subscribed(publisher)
        await publisher.pub.send_multipart([publisher.topic, b"three", b"frames"])
        await publisher.pub.send_multipart([publisher.topic, b"two"])
        await publisher.send(replace(engine.publish([]), payload=b"\xc1"))
        await publisher.send(engine.step())
        await until(lambda: feed._heard.tracker.applied == 1)
        assert fold.claims() == frozenset(engine.held)
        assert health(feed).counts.undecodable >= 3


@pytest.mark.parametrize("rng", [random.Random(7), None], ids=["seeded", "unseeded"])
async def test_an_engine_that_is_away_is_tried_again_with_growing_pauses(rng: random.Random | None) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    async with a_publisher() as publisher:
        spec = a_spec(publisher)
    async with a_feed(spec, Fold(), sleep=sleep, rng=rng) as feed:
        await until(lambda: len(pauses) >= 12)
        assert health(feed).trouble == "it refused the connection"
        assert not health(feed).connected
        assert health(feed).state is FeedState.EMPTY
        assert health(feed).confidence == 0.0
    assert pauses[0] <= 0.01
    assert max(pauses) > pauses[0]


async def test_something_that_is_no_engine_is_trouble_and_no_crash() -> None:
    async def speak_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak_http, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        spec = FeedSpec(RankCache("vllm-0"), "vllm", f"tcp://127.0.0.1:{port}")
        async with a_feed(spec, Fold()) as feed:
            await until(lambda: health(feed).trouble != "not connected yet")
            assert not health(feed).connected


async def test_sglang_has_its_epoch_in_the_topic() -> None:
    engine, fold = an_engine("sglang-maps", int_hashes=True), Fold()
    dialect = ZmqDialect(sglang.decode, sglang.epoch_of)
    async with a_publisher() as publisher, a_feed(a_spec(publisher, replay=None), fold, dialect=dialect) as feed:
        await subscribed(publisher)
        publisher.topic = b"kv@pod\x00sgl-kv-epoch=one"
        for _ in range(3):
            await publisher.send(engine.step())
        await until(lambda: feed._heard.tracker.applied == 2)
        engine.restart()
        engine._seq = 3
        publisher.topic = b"kv@pod\x00sgl-kv-epoch=two"
        await publisher.send(engine.step())
        await until(lambda: feed._heard.tracker.applied == 3)
        assert fold.claims() == frozenset(engine.held)
        assert health(feed).counts.restarts == 1
