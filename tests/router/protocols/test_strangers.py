"""Clients without a known key: how much they may ask, and what they may see."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from typing import Any

import aiohttp
import grpc
import pytest

from http1.limits import ServerLimits
from http1.message import Headers
from http1.request import Request
from http1.server import group_of
from policies.keys import hash_of
from policies.sla.parse import parse
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.grpc.v1.inference_pb2_grpc import InferenceStub
from router.protocols.strangers import BURST_S, MOST_ADDRESSES, Strangers, address_of, address_of_peer, is_in
from tests.http1.parts import eventually, no_connection
from tests.router.parts import CHAT, KEY, a_chat, a_client, a_config, a_router

OPERATOR = "operator"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_address_may_send_a_burst_and_then_as_many_as_its_bucket_gets() -> None:
    clock = Clock()
    strangers = Strangers(clock)
    for _ in range(5 * BURST_S):
        assert not strangers.is_over("a", 5)
        strangers.count("a", 5)
    assert strangers.is_over("a", 5)
    assert not strangers.is_over("b", 5)
    clock.now += 0.2
    assert not strangers.is_over("a", 5)
    strangers.count("a", 5)
    assert strangers.is_over("a", 5)
    clock.now += 1000
    for _ in range(5 * BURST_S):
        assert not strangers.is_over("a", 5)
        strangers.count("a", 5)
    assert strangers.is_over("a", 5)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:5000", "192.0.2.1"),
        ("ipv6:%5B2001:db8:1:2:3::4%5D:5000", "2001:db8:1:2::/64"),
        ("ipv6:[::ffff:10.0.0.1]:5000", "10.0.0.1"),
        ("unix:", ""),
        ("", ""),
    ],
)
def test_a_grpc_client_has_the_address_of_its_connection(peer: str, address: str) -> None:
    assert address_of_peer(peer) == address


def test_addresses_are_forgotten_in_the_order_in_which_they_were_heard() -> None:
    strangers = Strangers(Clock())
    for number in range(MOST_ADDRESSES):
        strangers.count(str(number), 1)
    for _ in range(BURST_S):
        strangers.count("0", 1)
    for number in range(MOST_ADDRESSES, 2 * MOST_ADDRESSES - 1):
        strangers.count(str(number), 1)
    assert strangers.is_over("0", 1)
    assert repr(strangers) == f"<Strangers at {MOST_ADDRESSES} addresses>"


def a_request(peer: str, forwarded: str | None = None) -> Request:
    headers = Headers(b"" if forwarded is None else f"X-Forwarded-For: {forwarded}\r\n".encode())
    request = Request("GET", "/", headers, no_connection(), ServerLimits())
    request.address = group_of((peer, 1234))
    return request


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.1", "203.0.113.9", "192.0.2.1"),
        ("10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "198.51.100.7, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("10.0.0.1", "203.0.113.9, nonsense", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9:4711", "203.0.113.9"),
        ("10.0.0.1", "192.0.2.7, 203.0.113.9:4711, 10.0.0.2:80", "203.0.113.9"),
        ("10.0.0.1", "[2001:db8:1:2:3::4]:4711", "2001:db8:1:2::/64"),
        ("10.0.0.1", "[2001:db8:1:2:3::4]", "2001:db8:1:2::/64"),
        ("10.0.0.1", "::ffff:203.0.113.9", "203.0.113.9"),
        ("10.0.0.1", "192.0.2.7,", "10.0.0.1"),
        ("10.0.0.1", "192.0.2.7, unknown", "10.0.0.1"),
        ("10.0.0.1", "192.0.2.7, 10.0.0.3, [", "10.0.0.1"),
        ("10.0.0.1", "2130706433", "10.0.0.1"),
        ("192.0.2.1", "[2001:db8:1:2:3::4]:4711", "192.0.2.1"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("2001:db8:9::5", "203.0.113.9", "203.0.113.9"),
        ("2001:db8::5", "203.0.113.9", "2001:db8::/64"),
    ],
)
def test_a_client_behind_a_trusted_proxy_has_the_address_that_the_proxy_saw(
    peer: str, forwarded: str | None, address: str
) -> None:
    assert address_of(a_request(peer, forwarded), ("10.0.0.0/8", "2001:db8:9::/48")) == address


def test_an_address_is_in_a_network_of_its_own_kind() -> None:
    assert is_in("10.1.2.3", ("::/0", "10.0.0.0/8"))
    assert not is_in("10.1.2.3", ("::/0",))
    assert not is_in("", ("0.0.0.0/0",))


async def test_guesses_are_refused_above_the_rate_and_known_keys_are_served_from_the_same_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # a connection rests after a refusal, and the bucket must not fill meanwhile
    async with a_router(config=a_config(stranger_requests=1), clock=Clock()) as router, a_client(router) as client:
        for _ in range(BURST_S):
            assert (await client.answer(CHAT, a_chat(), key="guess"))[0] == 401
        async with client.post(CHAT, a_chat(), key="guess") as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
            assert (await reply.json())["error"]["message"].startswith("too many requests without a known key")
        async with client.get("/v1/nowhere", key=None) as reply:
            assert reply.status == 429
        for path in ("/healthz", "/readyz"):
            async with client.get(path, key=None) as reply:
                assert reply.status == 200
        for _ in range(3 * BURST_S):
            assert (await client.answer(CHAT, a_chat(), key=KEY))[0] == 200
        text = router.telemetry.exposition()[0].decode()
    assert 'pointsman_http_limits_total{limit="requests_of_address"} 2.0' in text
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    (line,) = [line for line in lines if line.startswith("refused")]
    assert line.startswith("refused 1 requests without a known key, the last of 127.0.0.1")


async def test_idle_connections_of_one_address_are_limited_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with a_router(config=a_config(strangers=3)) as router, a_client(router) as client:
        before = router.telemetry.exposition()[0].decode()
        assert "pointsman_http_limits_total{" not in before
        idle = []
        for _ in range(10):
            reader, writer = await asyncio.open_connection(router.http.host, router.http.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHo")
            idle.append((reader, writer))
        assert await idle[0][0].read() == b""
        assert (await client.answer(CHAT, a_chat()))[0] == 200

        def shown(line: str) -> bool:
            return line in router.telemetry.exposition()[0].decode()

        await eventually(lambda: shown('pointsman_http_limits_total{limit="connections_of_address"} 8.0'))
        await eventually(lambda: shown('pointsman_http_connections{state="waiting"} 3.0'))
        for _, writer in idle:
            writer.transport.abort()
        await eventually(lambda: shown('pointsman_http_connections{state="waiting"} 1.0'))
    assert "its address has too many" in caplog.text


async def test_metrics_are_for_operators() -> None:
    config = a_config(admin_key_hashes=frozenset({hash_of(OPERATOR)}))
    async with a_router(config=config) as router, a_client(router) as client:
        for key in (None, KEY, "guess"):
            async with client.get("/metrics", key=key) as reply:
                text = await reply.text()
                assert (reply.status, "pointsman_" in text) == (401, False)
                assert "server.metrics" in text
        async with client.get("/metrics", key=OPERATOR) as reply:
            assert (reply.status, "pointsman_backend_healthy" in await reply.text()) == (200, True)


async def test_without_operators_keys_the_http_port_has_no_metrics() -> None:
    async with a_router() as router, a_client(router) as client:
        assert router.metrics_url is None
        async with client.get("/metrics", key="") as reply:
            assert reply.status == 401


async def test_metrics_may_be_open_to_everyone() -> None:
    async with a_router(config=a_config(metrics="open")) as router, a_client(router) as client:
        assert router.metrics_url == f"{router.http_url}/metrics"
        async with client.get("/metrics", key=None) as reply:
            assert (reply.status, "pointsman_backend_healthy" in await reply.text()) == (200, True)


async def test_metrics_may_have_an_address_of_their_own_which_serves_nothing_else() -> None:
    async with a_router(config=a_config(metrics="127.0.0.1:0")) as router, aiohttp.ClientSession() as session:
        assert router.metrics_url == f"http://{router.metrics}/metrics"
        async with session.get(router.metrics_url) as reply:
            assert (reply.status, "pointsman_backend_healthy" in await reply.text()) == (200, True)
        for path in ("/v1/models", "/healthz", "/admin/config"):
            async with session.get(f"http://{router.metrics}{path}") as reply:
                assert reply.status == 404


async def test_limits_of_strangers_follow_the_file_in_effect() -> None:
    async with a_router(config=a_config(strangers=1)) as router:
        config = router.gateway.config
        router.gateway.config = replace(config, server=replace(config.server, strangers=None, stranger_requests=None))
        await asyncio.sleep(1.1)
        held = []
        for _ in range(5):
            connection = socket.create_connection((router.http.host, router.http.port))
            connection.setblocking(False)
            held.append(connection)
        await asyncio.sleep(0.2)
        for connection in held:
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            connection.close()


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", (None, 512, 50, ())),
        ("server: {metrics: open, strangers: off}", ("open", None, None, ())),
        ("server: {metrics: '0.0.0.0:9090', strangers: {connections: 9}}", ("0.0.0.0:9090", 9, 50, ())),
        (
            "server: {strangers: {requests_per_second: 7}, trusted_proxies: [10.0.0.0/8, '::1']}",
            (None, 512, 7, ("10.0.0.0/8", "::1/128")),
        ),
    ],
)
def test_the_file_sets_the_limits(text: str, settings: tuple[object, ...]) -> None:
    server = parse(text).server
    assert (server.metrics, server.strangers, server.stranger_requests, server.trusted_proxies) == settings


async def test_calls_over_grpc_and_requests_over_http_count_together(caplog: pytest.LogCaptureFixture) -> None:
    config = a_config(stranger_requests=1, grpc="127.0.0.1:0")
    async with a_router(config=config) as router, grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]

        async def call(key: str) -> grpc.StatusCode:
            try:
                await stub.ListModels(pb.ListModelsRequest(), metadata=[("authorization", f"Bearer {key}")])
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        for _ in range(BURST_S):
            assert await call("no-key-of-ours") is grpc.StatusCode.UNAUTHENTICATED
        assert await call("no-key-of-ours") is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call(KEY) is grpc.StatusCode.OK, "a known key is served"
        async with aiohttp.ClientSession() as http, http.get(f"{router.http_url}/v1/models") as reply:
            assert reply.status == 429
        page, _ = router.telemetry.exposition("")
        assert b'limit="requests_of_address"} 2.0' in page
    assert "refused 1 requests without a known key, the last of 127.0.0.1" in caplog.text


async def test_calls_over_grpc_are_not_counted_where_strangers_are_not_limited() -> None:
    config = a_config(stranger_requests=None, grpc="127.0.0.1:0")
    async with a_router(config=config) as router, grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
        for _ in range(2 * BURST_S):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await stub.ListModels(pb.ListModelsRequest())
