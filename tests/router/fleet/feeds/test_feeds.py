from __future__ import annotations

import asyncio
import random
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from backends.events.nouns import CacheEvent
from policies.errors import ConfigError
from policies.prefix.index import PrefixIndex
from policies.sla.pools import PoolSpec
from router.fleet.feeds.feeds import Feeds
from router.fleet.feeds.health import FeedState
from router.fleet.feeds.sink import RankCache
from shards.kv.keys import block_keys, root_key
from tests.golden.event_encoders import Clear, Put, vllm_0_26
from tests.router.fleet.feeds.drained import a_server
from tests.router.fleet.feeds.engine import Engine
from tests.router.fleet.feeds.fold import Fold
from tests.router.fleet.feeds.publisher import Publisher, a_publisher, subscribed, unsubscribed
from tests.router.fleet.feeds.waiting import until


class Indexing:
    """Names what it hears by 64 tokens and tells an index: what the router makes of a feed, in its plainest form."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.folds: defaultdict[RankCache, Fold] = defaultdict(Fold)

    def hear(self, source: RankCache, event: CacheEvent) -> None:
        self.folds[source].hear(source, event)
        self.index.clear(source.backend)
        for salt, tokens in self.folds[source].claims():
            keys = block_keys(struct.pack(f"<{len(tokens)}I", *tokens), root_key("tiny", salt or ""))
            if len(tokens) % 64 == 0:
                self.index.store(source.backend, keys[-1:])

    def forget(self, backend: str) -> None:
        self.index.forget(backend)


async def test_what_engines_publish_is_found_in_the_index() -> None:
    prompt = tuple(range(1000, 1000 + 64 * 3 + 10))
    engine = Engine(vllm_0_26, random.Random(1), size=100, block_size=16)
    index = PrefixIndex()
    async with a_publisher() as publisher, a_server() as server:
        vllm = PoolSpec("gpu", kind="vllm", at=("http://here:1",), options={"events": publisher.events})
        options = {"events": server.url, "events_engine": "tensorrt_llm"}
        trt = PoolSpec("trt", kind="openai_compatible", at=("http://there:1",), options=options)
        async with Feeds([vllm, trt], Indexing(index)) as feeds:
            feeds.join("gpu-0", "gpu", "here:1")
            feeds.join("trt-0", "trt", "there:1")
            await subscribed(publisher)
            await publisher.send(engine.publish(list(engine.run(("acme", prompt[: 64 * 2 + 20])))))
            server.tell([Clear(), Put((1,), None, prompt[:64], 64)])
            await until(lambda: all(health.state is FeedState.LIVE for health in feeds.health()))
            keys = block_keys(struct.pack(f"<{len(prompt)}I", *prompt), root_key("tiny", "acme"))
            assert {name: match.blocks for name, match in index.longest(keys).items()} == {"gpu-0": 2}
            keys = block_keys(struct.pack(f"<{len(prompt)}I", *prompt), root_key("tiny", ""))
            assert {name: match.blocks for name, match in index.longest(keys).items()} == {"trt-0": 1}
            assert [str(health.source) for health in feeds.health()] == ["gpu-0", "trt-0"]


async def test_pools_without_events_cost_nothing() -> None:
    async with Feeds([PoolSpec("own", local=2)], Fold()) as feeds:
        feeds.join("own-0", "own", "here:1")
        feeds.join("x", "nowhere", "here:1")
        assert feeds.health() == ()


def a_found_pool(publisher: Publisher, **options: str) -> PoolSpec:
    events, replay = (f"tcp://*:{at.rpartition(':')[2]}" for at in (publisher.events, publisher.replay))
    return PoolSpec("gpu", kind="vllm", register=True, options={"events": events, "replay": replay, **options})


async def test_a_backend_that_was_found_is_heard_at_its_own_host_until_it_leaves() -> None:
    engine, fold = Engine(vllm_0_26, random.Random(1), size=100, block_size=16), Fold()
    async with a_publisher() as publisher, Feeds([a_found_pool(publisher)], fold) as feeds:
        assert feeds.health() == ()
        feeds.join("gpu@127.0.0.1:8000", "gpu", "127.0.0.1:8000")
        feeds.join("gpu@127.0.0.1:8000", "gpu", "127.0.0.1:8000")
        await subscribed(publisher)
        await publisher.send(engine.publish(list(engine.run((None, tuple(range(64)))))))
        await until(lambda: bool(fold.claims()))
        assert [str(health.source) for health in feeds.health()] == ["gpu@127.0.0.1:8000"]
        assert feeds.leave("gpu@127.0.0.1:8000") == ("gpu@127.0.0.1:8000",)
        assert not fold.claims()
        assert feeds.health() == ()
        heard = len(fold.heard)
        await unsubscribed(publisher)
        await publisher.send(engine.publish(list(engine.run((None, tuple(range(100, 164)))))))
        assert feeds.leave("gpu@127.0.0.1:8000") == ()
        # one that comes back is asked for everything that it still has
        feeds.join("gpu@127.0.0.1:8000", "gpu", "127.0.0.1:8000")
        assert len(fold.heard) == heard, "no event of a backend that had left, not even its loss"
        await until(lambda: len(fold.claims()) >= 8)
        # its blocks are there before the last message of the replay
        await until(lambda: feeds.health()[0].state is FeedState.LIVE)


async def test_each_rank_of_a_backend_that_was_found_leaves_with_it() -> None:
    async with a_publisher() as publisher, Feeds([a_found_pool(publisher, events_ranks="2")], Fold()) as feeds:
        feeds.join("gpu@127.0.0.1:1", "gpu", "http://127.0.0.1:1")
        assert [str(health.source) for health in feeds.health()] == ["gpu@127.0.0.1:1", "gpu@127.0.0.1:1/1"]
        assert feeds.leave("gpu@127.0.0.1:1") == ("gpu@127.0.0.1:1", "gpu@127.0.0.1:1/1")


@pytest.mark.parametrize("seed", range(3))
async def test_backends_that_join_and_leave_leave_no_task_however_often(seed: int) -> None:
    rng, there = random.Random(seed), set[str]()
    before = asyncio.all_tasks()
    async with a_publisher() as publisher:
        serving = asyncio.all_tasks() - before
        async with Feeds([a_found_pool(publisher)], Fold()) as feeds:
            for _ in range(60):
                name = f"gpu@127.0.0.1:{rng.randrange(4)}"
                if rng.random() < 0.5:
                    feeds.join(name, "gpu", "127.0.0.1:1")
                    there.add(name)
                else:
                    feeds.leave(name)
                    there.discard(name)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
                assert {str(health.source) for health in feeds.health()} == there
        assert asyncio.all_tasks() - before == serving


def test_mistakes_in_feeds_of_discovered_backends_are_reported_before_the_first_is_found() -> None:
    for options in ({"events": "tcp://here:5557"}, {"events": "tcp://*:5557", "replay": "tcp://here:5558"}):
        pool = PoolSpec("gpu", kind="vllm", register=True, options=options)
        with pytest.raises(ConfigError, match="finds backends at run time"):
            Feeds([pool], Fold())
    with pytest.raises(ConfigError, match="events_engine"):
        Feeds([PoolSpec("gpu", kind="tgi", register=True, options={"events": "tcp://*:5557"})], Fold())


def test_without_pyzmq_a_pool_with_backends_to_be_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    pool = PoolSpec("gpu", kind="vllm", register=True, options={"events": "tcp://*:5557"})
    with pytest.raises(ConfigError, match="pointsman\\[feeds\\]"):
        Feeds([pool], Fold())


def test_without_pyzmq_a_pool_that_names_events_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    pool = PoolSpec("gpu", kind="vllm", at=("http://a:1",), options={"events": "tcp://*:5557"})
    with pytest.raises(ConfigError, match="pointsman\\[feeds\\]"):
        Feeds([pool], Fold())


def test_a_router_without_such_pools_does_not_import_zmq() -> None:
    script = "import sys, router.fleet.feeds.feeds; print('zmq' in sys.modules)"
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
