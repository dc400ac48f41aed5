"""Routers share one Redis under one name; several deployments may use it side by side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backends.fake import FakeBackend
from policies.nouns import Limits
from policies.quota.budget import Charge, Descriptor, Refused, Reservation
from policies.sla.parse import parse
from router.fleet.prompt_keys import PromptKeys
from router.shared.replicas.feed_relay import RedisRelay
from router.start.app import Router
from router.start.shared import relay
from tests.router.shared.store.parts import RedisServer, a_redis, reserved
from tests.shards.attached import eventually

FILE = """
classes: {chat: {}}
tenants: {acme: {anonymous: true, classes: [chat], limits: {requests_per_minute: 60}}}
pools: {own: {kind: fake, at: ["x:1"]}}
rules: [{class: chat}]
store: {redis: "URL", namespace: NAME}
server: {http: "127.0.0.1:0", grpc: off, drain: 10ms}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


def a_router(server: RedisServer, name: str) -> Router:
    config = parse(FILE.replace("URL", server.url).replace("NAME", name))
    return Router(config, backends=lambda _: (FakeBackend("a", pool="own"),))


async def test_two_deployments_share_a_redis_and_nothing_in_it(server: RedisServer) -> None:
    server.clean()
    async with a_router(server, "east") as east, a_router(server, "east") as also, a_router(server, "west") as west:
        assert also.gateway.replicas is not None
        await east.gateway.keys.issue("acme")
        await also.gateway.keys.look()
        await west.gateway.keys.look()
        assert len(also.gateway.keys.of("acme")) == 1
        assert west.gateway.keys.of("acme") == []
        also.gateway.beliefs.sent("a", PromptKeys((1, 2, 3)))
        await eventually(lambda: east.gateway.beliefs.longest(PromptKeys((1, 2, 3))) != {})
        assert west.gateway.beliefs.longest(PromptKeys((1, 2, 3))) == {}
        with server.admin() as admin:
            names = {bytes(name) for name in admin.keys("*")}
    assert {name.partition(b":")[0] for name in names} == {b"east", b"west"}


async def test_cells_share_quotas_and_keys_but_no_news(server: RedisServer) -> None:
    server.clean()

    def in_cell(cell: str) -> Router:
        text = FILE.replace("URL", server.url).replace("NAME", f"all, replicas: 2, cell: {cell}")
        return Router(parse(text), backends=lambda _: (FakeBackend("a", pool="own"),))

    async with in_cell("one") as one, in_cell("one") as also, in_cell("two") as two:
        also.gateway.beliefs.sent("a", PromptKeys((1, 2, 3)))
        await eventually(lambda: one.gateway.beliefs.longest(PromptKeys((1, 2, 3))) != {})
        assert two.gateway.beliefs.longest(PromptKeys((1, 2, 3))) == {}
        await one.gateway.keys.issue("acme")
        await two.gateway.keys.look()
        assert len(two.gateway.keys.of("acme")) == 1
        descriptors = (Descriptor("acme", Limits(requests_per_minute=60)),)
        await reserved(one.gateway.admission.store, Reservation("r", descriptors, Charge(50)))
        refused = await reserved(two.gateway.admission.store, Reservation("s", descriptors, Charge(50)))
        assert isinstance(refused, Refused)


async def test_quotas_may_lie_in_other_servers(server: RedisServer) -> None:
    server.clean()
    tenants = [f"tenant-{number}" for number in range(20)]
    with a_redis() as first, a_redis() as second:
        text = FILE.replace("URL", server.url).replace("NAME", f"all, quotas: ['{first.url}', '{second.url}']")
        async with Router(parse(text), backends=lambda _: (FakeBackend("a", pool="own"),)) as router:
            for tenant in tenants:
                descriptors = (Descriptor(tenant, Limits(requests_per_minute=60)),)
                granted = await reserved(router.gateway.admission.store, Reservation(tenant, descriptors, Charge(1)))
                assert isinstance(granted, Reservation)
        with server.admin() as news, first.admin() as some, second.admin() as others:
            assert not news.keys("*tenant*")
            assert {len(some.keys("*levels")), len(others.keys("*levels"))} != {0, 20}
            assert len(some.keys("*levels")) + len(others.keys("*levels")) == 20


async def test_what_is_drained_from_engines_lies_under_that_name_too(server: RedisServer) -> None:
    server.clean()
    shared = relay(parse(FILE.replace("URL", server.url).replace("NAME", "east")).store)
    assert isinstance(shared, RedisRelay)
    token = await shared.claim("trt-0", "a", 60)
    assert token is not None
    await shared.publish("trt-0", token, b"[]")
    await shared.close()
    with server.admin() as admin:
        assert {bytes(name) for name in admin.keys("*")} == {b"east:feeds:{trt-0}:lease", b"east:feeds:{trt-0}:events"}


async def test_prefixes_are_kept_through_the_same_redis(server: RedisServer) -> None:
    async with a_router(server, "east") as east:
        replicas, prefixes = east.gateway.replicas, east.gateway.prefixes
        assert replicas is not None
        assert (prefixes._tell, prefixes._catch_up) == (replicas.tell, replicas.catch_up)
