from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from backends.events import CacheEvent
from policies.config import PoolSpec
from policies.errors import ConfigError
from policies.prefix.index import PrefixIndex
from router.feeds.feeds import Feeds
from router.feeds.health import FeedState
from router.feeds.sink import Source
from shards.kv.keys import block_keys, root_key
from tests.golden.event_encoders import Clear, Put, vllm_0_26
from tests.router.feeds.drained import a_server
from tests.router.feeds.engine import Engine
from tests.router.feeds.fold import Fold
from tests.router.feeds.publisher import a_publisher, subscribed
from tests.router.feeds.waiting import until


class Indexing:
    """Names what it hears by 64 tokens and tells an index: what the router makes of a feed, in its plainest form."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index, self.fold = index, Fold()

    def hear(self, source: Source, event: CacheEvent) -> None:
        self.fold.hear(source, event)
        self.index.clear(source.backend)
        for salt, tokens in self.fold.claims():
            keys = block_keys(struct.pack(f"<{len(tokens)}I", *tokens), root_key("tiny", salt or ""))
            if len(tokens) % 64 == 0:
                self.index.store(source.backend, keys[-1:])


async def test_what_engines_publish_is_found_in_the_index() -> None:
    prompt = tuple(range(1000, 1000 + 64 * 3 + 10))
    engine = Engine(vllm_0_26, random.Random(1), size=100, block_size=16)
    index = PrefixIndex()
    async with a_publisher() as publisher, a_server() as server:
        vllm = PoolSpec("gpu", kind="vllm", at=("http://here:1",), options={"events": publisher.events})
        options = {"events": server.url, "events_engine": "tensorrt_llm"}
        trt = PoolSpec("trt", kind="openai_compatible", at=("http://there:1",), options=options)
        async with Feeds([vllm, trt], Indexing(index)) as feeds:
            await subscribed(publisher)
            await publisher.send(engine.publish(list(engine.run(("acme", prompt[: 64 * 2 + 20])))))
            server.tell([Clear(), Put((1,), None, prompt[:64], 64)])
            await until(lambda: all(health.state is FeedState.LIVE for health in feeds.health()))
            keys = block_keys(struct.pack(f"<{len(prompt)}I", *prompt), root_key("tiny", "acme"))
            assert {name: match.blocks for name, match in index.longest(keys).items()} == {"gpu-0": 2}
            keys = block_keys(struct.pack(f"<{len(prompt)}I", *prompt), root_key("tiny", ""))
            assert {name: match.blocks for name, match in index.longest(keys).items()} == {"trt-0": 1}
            assert [health.source for health in feeds.health()] == ["gpu-0", "trt-0"]


async def test_pools_without_events_cost_nothing() -> None:
    async with Feeds([PoolSpec("own", local=2)], Fold()) as feeds:
        assert feeds.health() == ()


def test_without_pyzmq_a_pool_that_names_events_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    pool = PoolSpec("gpu", kind="vllm", at=("http://a:1",), options={"events": "tcp://*:5557"})
    with pytest.raises(ConfigError, match="pointsman\\[feeds\\]"):
        Feeds([pool], Fold())


def test_a_router_without_such_pools_does_not_import_zmq() -> None:
    script = "import sys, router.feeds.feeds; print('zmq' in sys.modules)"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
