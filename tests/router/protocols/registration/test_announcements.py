"""Backends announce themselves at the operators' port and get requests: ours, LMDeploy's, and refused ones."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from policies.sla.parse import parse
from router.protocols.http.routes import Routes
from router.protocols.registration.announcements import add_announcements
from router.start.app import Router
from shards.announce import Announcement, Announcer, reachable_address
from tests.standins.fastchat import FastChatWorker
from tests.standins.lmdeploy import LMDeployServer
from tests.standins.standin import running

SLA = """
classes: {chat: {}}
pools:
  own: {kind: fake, model: tiny, register: true}
  arena: {kind: fastchat, model: m, register: true, health: {probe_every: 20ms}}
  lm: {kind: lmdeploy, model: m, register: true, health: {probe_every: 20ms}}
  fixed: {kind: fake, at: ["here:1"], model: tiny}
rules: [{class: chat}]
server: {http: "127.0.0.1:0", grpc: off, admin: "127.0.0.1:0", admin_keys: ["${env:KEY}"], drain: 1s}
"""
BEARER = {"authorization": "Bearer hush"}


class Port:
    """The operators' port of a router."""

    def __init__(self, router: Router, http: aiohttp.ClientSession) -> None:
        self.router, self._http = router, http

    async def __call__(self, path: str, body: Any = None, *, headers: Any = BEARER) -> tuple[int, Any]:
        method = "GET" if body is None else "POST"
        async with self._http.request(method, f"http://{self.router.admin}{path}", json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    def names(self) -> set[str]:
        return {backend.name for backend in self.router.gateway.cluster.view(0.0).backends}

    async def until(self, *names: str) -> None:
        async with asyncio.timeout(5):
            while self.names() != {*names, "fixed-0"}:  # noqa: ASYNC110 - what comes over a socket announces nothing
                await asyncio.sleep(0.005)


@asynccontextmanager
async def a_port() -> AsyncIterator[Port]:
    async with Router(parse(SLA, environment={"KEY": "hush"})) as router, aiohttp.ClientSession() as http:
        yield Port(router, http)
        router.check()


async def test_a_backend_that_announces_itself_is_there_until_it_takes_that_back() -> None:
    async with a_port() as port:
        announcement = {"pool": "own", "address": "10.0.0.1:7001", "ttl_s": 30}
        assert await port("/backends/register", announcement) == (200, {"ttl_s": 30.0})
        await port.until("own@10.0.0.1:7001")
        status, known = await port("/backends/registered")
        assert status == 200
        assert known["own"]["10.0.0.1:7001"] == pytest.approx(30, abs=5)
        assert await port("/backends/unregister", announcement) == (200, {"known": True})
        await port.until()
        assert await port("/backends/unregister", announcement) == (200, {"known": False})


async def test_servers_of_lmdeploy_do_as_with_their_own_proxy_and_are_asked_for_answers() -> None:
    async with running(LMDeployServer()) as server, a_port() as port:
        name = f"lm@{server.url.partition('://')[2]}"
        # the key as the password of --proxy-url
        basic = {"authorization": "Basic " + base64.b64encode(b"any:hush").decode()}
        added = {"url": server.url, "status": {"models": ["m"], "role": 1}}
        assert await port("/nodes/add", added, headers=basic) == (200, "Added successfully")
        await port.until(name)
        assert await port("/nodes/status") == (
            200,
            {server.url: {"models": ["m"], "unfinished": 0, "latency": [], "speed": None}},
        )
        assert await port.router.wait_until_reached(5)
        assert "m" in port.router.models()
        assert await port(f"/nodes/remove?node_url={server.url}", {}) == (200, "Deleted successfully")
        await port.until()


async def test_workers_of_fastchat_do_as_with_their_own_controller_and_are_asked_for_answers() -> None:
    async with running(FastChatWorker()) as worker, a_port() as port:
        name = f"arena@{worker.url.partition('://')[2]}"
        basic = {"authorization": "Basic " + base64.b64encode(b"any:hush").decode()}
        status = {"model_names": ["m"], "speed": 1, "queue_length": 0}
        announcement = {
            "worker_name": worker.url,
            "check_heart_beat": True,
            "worker_status": status,
            "multimodal": False,
        }
        assert await port("/register_worker", announcement, headers=basic) == (200, None)
        await port.until(name)
        beat = {"worker_name": worker.url, "queue_length": 0}
        assert await port("/receive_heart_beat", beat, headers=basic) == (200, {"exist": True})
        assert await port.router.wait_until_reached(5)
        async with aiohttp.ClientSession() as client:
            body = {"model": "m", "prompt": "hello", "max_tokens": 3}
            async with client.post(f"{port.router.http_url}/v1/completions", json=body) as reply:
                assert reply.status == 200
                assert (await reply.json())["choices"][0]["text"]
        # given up, as after a long illness: it hears so when it beats, and comes back
        assert port.router.gateway.fleet.registries["arena"].unregister(worker.url)
        assert await port("/receive_heart_beat", beat, headers=basic) == (200, {"exist": False})
        await port.until()
        assert await port("/register_worker", announcement, headers=basic) == (200, None)
        await port.until(name)
        worker.is_ill = True
        await port("/refresh_all_workers", {}, headers=basic)
        await port.until()
        assert await port("/receive_heart_beat", beat, headers=basic) == (200, {"exist": False})


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic !"}])
async def test_announcements_need_a_key(headers: dict[str, str]) -> None:
    async with a_port() as port:
        announcement = {"pool": "own", "address": "10.0.0.1:7001"}
        for path in ("/backends/register", "/backends/unregister", "/nodes/add", "/nodes/remove", "/register_worker"):
            assert (await port(path, announcement, headers=headers))[0] == 401
        assert (await port("/backends/registered", headers=headers))[0] == 401
        assert port.names() == {"fixed-0"}


DEEP = json.loads("[" * 128 + "]" * 128)


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/backends/register", {"pool": "onw", "address": "a:1"}, "did you mean 'own'?"),
        ("/backends/register", {"pool": "fixed", "address": "a:1"}, "cannot announce themselves to 'fixed'"),
        ("/backends/register", {"pool": "own", "address": "http://a:1"}, "must be host:port"),
        ("/backends/register", {"pool": "own", "address": "a:1", "ttl_s": 0}, "ttl_s is 0"),
        ("/backends/register", {"address": "a:1"}, "missing required field `pool`"),
        ("/backends/register", [], "cannot be read"),
        ("/backends/register", {"pool": "own", "address": "a:1", "more": DEEP}, "nested more than 128 levels"),
        ("/register_worker", {"worker_name": "http://w:1", "more": DEEP}, "nested more than 128 levels"),
        ("/nodes/add", {"url": "a:1"}, "must be an address like http://host:8000"),
        ("/nodes/add", {"url": "http://[::1"}, "must be an address like http://host:8000"),
        ("/nodes/add", {"url": "http://a:²"}, "must be an address like http://host:8000"),
        ("/nodes/add", {"url": "http://a:65536"}, "must be an address like http://host:8000"),
        ("/nodes/add", {"url": "http://a:0"}, "must be an address like http://host:8000"),
        ("/nodes/add", {"url": "http://:80"}, "must be an address like http://host:8000"),
        ("/nodes/add", {"url": "http://\u2100.com"}, "must be an address like http://host:8000"),
        ("/nodes/add", {"url": "http://a:" + "1" * 5000}, "must be an address like http://host:8000"),
        ("/nodes/add", {"url": "http://me:pass@a:1"}, "must not contain a user or a password"),
        ("/nodes/remove", {}, "missing required field `url`"),
        ("/register_worker", {"worker_name": "file:///etc/passwd"}, "a worker's name is its URL"),
        (
            "/register_worker",
            {"worker_name": "http://w:1", "worker_status": {"model_names": "m"}},
            "not a message of a FastChat",
        ),
        ("/receive_heart_beat", {"queue_length": 1}, "missing required field `worker_name`"),
        ("/get_worker_address", [], "not a message of a FastChat worker"),
    ],
)
async def test_what_cannot_be_announced_is_refused_with_the_reason(path: str, body: Any, why: str) -> None:
    async with a_port() as port:
        status, reply = await port(path, body)
        assert status == 400
        assert why in reply["error"]["message"]
        assert port.names() == {"fixed-0"}


async def test_a_shard_announces_itself_again_and_again_and_takes_it_back() -> None:
    async with a_port() as port:
        what = Announcement([f"http://{port.router.admin}"], "own", "10.0.0.1:7001", "hush")
        announcer = Announcer(what, every_s=0.01)
        await announcer.start()
        await port.until("own@10.0.0.1:7001")
        registry = port.router.gateway.fleet.registries["own"]
        registry.unregister("10.0.0.1:7001")
        await port.until("own@10.0.0.1:7001")
        await announcer.stop()
        assert "10.0.0.1:7001" not in registry
        await port.until()


async def test_a_shard_without_a_reachable_router_logs_it_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with a_port() as port:
        routers = [f"http://{port.router.admin}", "http://127.0.0.1:1"]
        announcer = Announcer(Announcement(routers, "own", "10.0.0.1:7001", "wrong"), every_s=0.005)
        await announcer.start()
        await asyncio.sleep(0.1)
        await announcer.stop()
        logged = [record.getMessage() for record in caplog.records if record.name == "pointsman.announce"]
        assert len(logged) == 2
        assert any("401" in line for line in logged)


def test_a_shard_on_all_interfaces_announces_the_one_towards_the_router() -> None:
    assert reachable_address("10.0.0.1:7001", "http://127.0.0.1:9000") == "10.0.0.1:7001"
    assert reachable_address("0.0.0.0:7001", "http://127.0.0.1:9000") == "127.0.0.1:7001"
    assert reachable_address("[::]:7001", "http://127.0.0.1:9000") == "127.0.0.1:7001"


def test_all_of_it_is_served_where_operators_are() -> None:
    routes = Routes()
    add_announcements(routes, None)  # type: ignore[arg-type]
    assert set(routes) == {
        *(f"/backends/{what}" for what in ("register", "unregister", "registered")),
        *(f"/nodes/{what}" for what in ("add", "remove", "status")),
    }
