"""Feeds follow a router's membership: whoever announces itself is listened to, and whoever leaves is forgotten."""

from __future__ import annotations

import random
import struct

from policies.sla.parse import parse
from router.app import Router
from router.cluster.names import found_name
from router.prompt_keys import PromptKeys
from shards.kv.keys import block_keys, root_key
from tests.golden.event_encoders import vllm_0_26
from tests.router.feeds.engine import Engine
from tests.router.feeds.publisher import a_publisher, subscribed, unsubscribed
from tests.router.feeds.waiting import until
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
        # it has told all this before anybody listened, and repeats it
        await publisher.send(engine.publish(list(engine.run(("acme", PROMPT)))))
        async with Router(config) as router:
            gateway = router.gateway
            registry, address = gateway.finding.registries["gpu"], server.url.partition("://")[2]
            name = found_name("gpu", address)
            assert gateway.feeds.health() == ()
            registry.register(address, ttl_s=30)
            await subscribed(publisher)
            await until(lambda: name in gateway.beliefs.longest(PromptKeys(KEYS)))
            assert gateway.beliefs.longest(PromptKeys(KEYS))[name].blocks == 2
            await until(lambda: f'source="{name}"'.encode() in gateway.telemetry.exposition()[0])
            registry.unregister(address)
            await unsubscribed(publisher)
            await until(lambda: name not in gateway.cluster)
            assert gateway.beliefs.longest(PromptKeys(KEYS)) == {}
            assert gateway.feeds.health() == ()
            assert name.encode() not in gateway.telemetry.exposition()[0]
            registry.register(address, ttl_s=30)
            await until(lambda: name in gateway.beliefs.longest(PromptKeys(KEYS)))
            router.check()
