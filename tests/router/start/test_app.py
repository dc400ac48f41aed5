from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from http1.server import HttpServer
from policies.errors import ConfigError
from policies.sla.parse import parse
from router.start.address import Address
from router.start.app import Router
from tests.router.parts import CHAT, ScriptedBackend, a_chat, a_client, a_config, a_router


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), (":80", ("0.0.0.0", 80)), ("a.b:0", ("a.b", 0))],
)
def test_addresses_are_read(text: str, address: tuple[str, int]) -> None:
    read = Address.parse(text)
    assert (read.host, read.port) == address
    assert Address.parse(str(read)) == read


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:99999"])
def test_what_is_no_address_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        Address.parse(text)


async def test_a_router_has_the_ports_that_it_got_and_gives_them_back() -> None:
    async with a_router(config=a_config(grpc="127.0.0.1:0")) as router:
        http, grpc = router.http, router.grpc
        assert http.port
        assert grpc is not None
        assert grpc.port
        assert router.models() == ("tiny",)
        again = a_config(http=str(http), grpc=str(grpc))
        with pytest.raises(ConfigError, match="address already in use"):
            async with a_router(config=again):
                pass
    async with a_router(config=again) as router:
        assert router.http == http


async def test_each_port_of_the_file_is_served_and_the_router_has_its_number() -> None:
    config = a_config(metrics="127.0.0.1:0", admin="127.0.0.1:0")
    async with a_router(config=config) as router, aiohttp.ClientSession() as http:
        for address, path in (
            (router.http, "/v1/models"),
            (router.metrics, "/metrics"),
            (router.admin, "/admin/config"),
        ):
            assert address is not None
            assert address.port
            async with http.get(f"http://{address}{path}", headers={"authorization": "Bearer acme-key"}) as reply:
                assert reply.status == 200, path


async def test_a_router_that_cannot_listen_leaves_nothing_behind() -> None:
    async with a_router() as router:
        backend = ScriptedBackend()
        with pytest.raises(ConfigError, match="cannot listen"):
            async with a_router(backend, config=a_config(http=str(router.http))):
                pass
    names = {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]
    assert not names


async def test_running_requests_end_before_a_router_does() -> None:
    release = asyncio.Event()
    backend = ScriptedBackend(scripts=[[release]])
    async with a_router(config=a_config()) as outer, a_client(outer):
        router = Router(a_config(), backends=lambda _: [backend])
        await router.__aenter__()
        assert await router.wait_until_reached(5)
        async with a_client(router) as client:
            call = asyncio.create_task(client.answer(CHAT, a_chat()))
            await backend.began.wait()
            leaving = asyncio.create_task(router.__aexit__(None, None, None))
            await asyncio.sleep(0)
            assert not router.gateway.doors.open
            assert not leaving.done()
            release.set()
            assert (await call)[0] == 200
            await leaving
    router.check()


async def test_requests_that_outlast_the_grace_are_cancelled() -> None:
    backend = ScriptedBackend(scripts=[[asyncio.Event()]])
    router = Router(a_config(drain_s=0.05), backends=lambda _: [backend])
    async with a_client(router) as _, router:
        assert await router.wait_until_reached(5)
        async with a_client(router) as client:
            call = asyncio.create_task(client.answer(CHAT, a_chat()))
            await backend.began.wait()
            await router.__aexit__(None, None, None)
            assert backend.cancelled.is_set()
            await asyncio.gather(call, return_exceptions=True)
    router.check()


async def test_a_pool_that_stays_away_is_not_waited_for_for_ever() -> None:
    async with a_router(ScriptedBackend(well=False)) as router:
        assert not await router.wait_until_reached(0.05)


async def test_backends_are_made_from_the_file() -> None:
    config = parse("""
server: {http: "127.0.0.1:0", grpc: off}
pools:
  own: {kind: fake, at: ["x:1", "x:2"], model: tiny}
""")
    async with Router(config) as router:
        assert await router.wait_until_reached(5)
        assert router.models() == ("tiny",)
        assert {backend.name for backend in router.gateway.cluster.view(0.0).backends} == {"own-0", "own-1"}
        async with a_client(router) as client:
            status, body = await client.answer(CHAT, a_chat(), key=None)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello, world.")


async def test_a_grpc_port_that_is_taken_is_named() -> None:
    async with a_router(config=a_config(grpc="127.0.0.1:0")) as router:
        with pytest.raises(ConfigError, match=f"cannot listen on {router.grpc}"):
            async with a_router(config=a_config(grpc=str(router.grpc))):
                pass


PARTS: dict[str, Callable[[Router], tuple[object, str]]] = {
    "decision log": lambda router: (router.telemetry.decisions, "close"),
    "learning": lambda router: (router.gateway.later, "flush"),
    "tokenizers": lambda router: (router.gateway.tokenizers, "close"),
    "bodies": lambda router: (router.gateway.bodies, "close"),
    "sources": lambda router: (router.gateway.sources, "close"),
    "store": lambda router: (router.gateway.admission.store, "close"),
    "keys": lambda router: (router.gateway.keys, "close"),
    "alerts": lambda router: (router.operations.alerts, "close"),
    "relay of feeds": lambda router: (router.gateway.feeds._relay, "close"),
    "first backend": lambda router: (next(iter(router.gateway.cluster._members.values())).backend, "close"),
    "last backend": lambda router: (list(router.gateway.cluster._members.values())[-1].backend, "close"),
    "mirrors": lambda router: (router.gateway.mirrors, "close"),
    "waking": lambda router: (router.gateway.waking, "close"),
    "document sets": lambda router: (router.gateway.document_sets._store, "close"),
    "doors": lambda router: (router.gateway.doors, "emptied"),
}
"""What a router closes at its end, and how; besides its ports."""


@pytest.mark.parametrize("failing", [*PARTS, "ports"])
async def test_a_part_that_fails_to_close_keeps_no_other_from_it_and_its_error_is_reported(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = set[str]()

    def watch(part: str, owner: object, method: str) -> None:
        close = getattr(owner, method)

        def note() -> None:
            closed.add(part)
            if part == failing:
                raise RuntimeError(f"{part} cannot be closed")

        async def watched(*args: object, **named: object) -> object:
            result = await close(*args, **named)
            note()
            return result

        def watched_now(*args: object, **named: object) -> object:
            result = close(*args, **named)
            note()
            return result

        monkeypatch.setattr(owner, method, watched if iscoroutinefunction(close) else watched_now)

    backends = [ScriptedBackend("b0"), ScriptedBackend("b1")]
    config = a_config(decision_log=str(tmp_path / "log"))
    router = Router(config, backends=lambda _: backends)
    for part, find in PARTS.items():
        watch(part, *find(router))
    close = HttpServer.close

    async def close_port(server: HttpServer, *args: Any) -> None:
        await close(server, *args)
        closed.add("ports")
        if failing == "ports":
            raise RuntimeError("ports cannot be closed")

    monkeypatch.setattr(HttpServer, "close", close_port)
    with suppress(RuntimeError):
        async with router:
            pass
        assert failing in {"first backend", "last backend"}
    assert closed == PARTS.keys() | {"ports"}
    if failing.endswith("backend"):
        assert f"{failing} cannot be closed" in caplog.text
    names = {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]
    assert not names


async def test_where_a_backend_cannot_be_started_those_before_it_are_closed() -> None:
    first, second = ScriptedBackend("b0"), ScriptedBackend("b1")
    closed: list[str] = []

    async def start() -> None:
        raise RuntimeError("no")

    async def close() -> None:
        closed.append("b0")

    first.close, second.start = close, start  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        async with Router(a_config(), backends=lambda _: [first, second]):
            pass
    assert closed == ["b0"]
