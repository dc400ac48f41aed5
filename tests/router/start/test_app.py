from __future__ import annotations

import asyncio

import aiohttp
import pytest

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
