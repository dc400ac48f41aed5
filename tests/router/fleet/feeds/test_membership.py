"""Feeds follow a router's membership: they begin when a backend announces itself and end when it leaves."""

from __future__ import annotations

import random
import struct

import pytest

from policies.sla.parse import parse
from router.fleet.cluster.names import found_name
from router.fleet.prompt_keys import PromptKeys
from router.start.app import Router
from shards.kv.keys import block_keys, root_key
from tests.golden.event_encoders import vllm_0_26
from tests.router.fleet.feeds.engine import Engine
from tests.router.fleet.feeds.publisher import Publisher, a_publisher, subscribed, unsubscribed
from tests.router.fleet.feeds.waiting import until
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

SLA = """
classes: {chat: {}}
pools:
  gpu:
    kind: vllm
    register: true
    options: {events: "tcp://*:EVENTS", replay: "tcp://*:REPLAY"}
    health: {probe_every: 20ms}
rules: [{class: chat}]
server: {http: "127.0.0.1:0", grpc: off, drain: 10ms}
"""
PROMPT = tuple(range(1000, 1000 + 128))
KEYS = block_keys(struct.pack(f"<{len(PROMPT)}I", *PROMPT), root_key("m", "acme"))


async def test_events_of_a_backend_that_announced_itself_are_in_the_index_until_it_leaves() -> None:
    engine = Engine(vllm_0_26, random.Random(1), size=100, block_size=16)
    async with running(VLLMServer()) as server, a_publisher() as publisher:
        ports = [at.rpartition(":")[2] for at in (publisher.events, publisher.replay)]
        config = parse(SLA.replace("EVENTS", ports[0]).replace("REPLAY", ports[1]))
        # it published all this before the feed began, and replays it
        await publisher.send(engine.publish(list(engine.run(("acme", PROMPT)))))
        async with Router(config) as router:
            gateway = router.gateway
            registry, address = gateway.fleet.registries["gpu"], server.url.partition("://")[2]
            name = found_name("gpu", address)
            assert gateway.feeds.health() == ()
            registry.register(address, ttl_s=30)
            await subscribed(publisher)
            await until(lambda: name in gateway.beliefs.longest(PromptKeys(KEYS)))
            assert gateway.beliefs.longest(PromptKeys(KEYS))[name].blocks == 2
            await until(lambda: f'source="{name}"'.encode() in gateway.observer.exposition()[0])
            registry.unregister(address)
            await unsubscribed(publisher)
            await until(lambda: name not in gateway.cluster)
            await until(lambda: not gateway.beliefs.longest(PromptKeys(KEYS)))
            await until(lambda: gateway.feeds.health() == ())
            await until(lambda: name.encode() not in gateway.observer.exposition()[0])
            registry.register(address, ttl_s=30)
            await until(lambda: name in gateway.beliefs.longest(PromptKeys(KEYS)))
            router.check()


FOUND = """
classes: {chat: {}}
pools:
  gpu: {kind: vllm, at: ["URL"], health: {probe_every: 20ms, failures: 1}OPTIONS}
rules: [{class: chat}]
server: {http: "127.0.0.1:0", grpc: off, drain: 10ms}
"""


def source_of(publisher: Publisher) -> dict[str, dict[str, str]]:
    events, replay = (f"tcp://*:{at.rpartition(':')[2]}" for at in (publisher.events, publisher.replay))
    return {"0": {"endpoint": events, "replay_endpoint": replay, "topic": "kv-events"}}


async def test_a_vllm_that_reports_its_publisher_is_read_although_its_pool_names_no_events() -> None:
    engine = Engine(vllm_0_26, random.Random(1), size=100, block_size=16)
    async with a_publisher() as publisher, running(VLLMServer(event_sources=source_of(publisher))) as server:
        await publisher.send(engine.publish(list(engine.run(("acme", PROMPT)))))
        async with Router(parse(FOUND.replace("URL", server.url).replace("OPTIONS", ""))) as router:
            beliefs = router.gateway.beliefs
            await until(lambda: "gpu-0" in beliefs.longest(PromptKeys(KEYS)))
            assert beliefs.longest(PromptKeys(KEYS))["gpu-0"].blocks == 2
            router.check()


async def test_a_vllm_that_comes_back_and_publishes_elsewhere_is_heard_there_and_its_former_blocks_are_forgotten() -> (
    None
):
    engine, other = (Engine(vllm_0_26, random.Random(seed), size=100, block_size=16) for seed in (1, 2))
    async with (
        a_publisher() as before,
        a_publisher() as after,
        running(VLLMServer(event_sources=source_of(before))) as server,
    ):
        await before.send(engine.publish(list(engine.run(("acme", PROMPT)))))
        async with Router(parse(FOUND.replace("URL", server.url).replace("OPTIONS", ""))) as router:
            gateway = router.gateway
            await until(lambda: "gpu-0" in gateway.beliefs.longest(PromptKeys(KEYS)))
            server.is_ill = True
            await until(lambda: not gateway.is_ready())
            server.event_sources, server.is_ill = source_of(after), False
            await unsubscribed(before)
            await subscribed(after)
            await until(lambda: not gateway.beliefs.longest(PromptKeys(KEYS)))
            await after.send(other.publish(list(other.run(("acme", PROMPT[:64])))))
            await until(lambda: "gpu-0" in gateway.beliefs.longest(PromptKeys(KEYS)))
            assert gateway.beliefs.longest(PromptKeys(KEYS))["gpu-0"].blocks == 1
            assert [health.counts.batches for health in gateway.feeds.health()] == [1]


@pytest.mark.parametrize("written", [True, False], ids=["switched off", "a version that does not tell"])
async def test_a_vllms_events_are_not_read_if_switched_off_or_without_a_reported_publisher(written: bool) -> None:
    async with a_publisher() as publisher:
        sources = source_of(publisher) if written else None
        async with running(VLLMServer(event_sources=sources)) as server:
            options = ", options: {events: none}" if written else ""
            async with Router(parse(FOUND.replace("URL", server.url).replace("OPTIONS", options))) as router:
                await until(router.gateway.is_ready)
                await router.gateway.feeds.asked()
                assert router.gateway.feeds.health() == ()


async def test_without_pyzmq_a_vllm_that_reports_its_publisher_is_not_read_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.fleet.feeds.feeds.find_spec", lambda _: None)
    async with (
        a_publisher() as publisher,
        running(VLLMServer(event_sources=source_of(publisher))) as server,
        Router(parse(FOUND.replace("URL", server.url).replace("OPTIONS", ""))) as router,
    ):
        feeds = router.gateway.feeds
        await until(router.gateway.is_ready)
        for _ in range(2):
            await feeds.asked()
            feeds.ask("gpu-0")
        await feeds.asked()
        assert feeds.health() == ()
    assert caplog.text.count("pip install 'pointsman[feeds]'") == 1
