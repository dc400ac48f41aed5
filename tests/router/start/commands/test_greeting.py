"""What a router prints at its start: addresses at once, whatever its backends do."""

from __future__ import annotations

import asyncio
import socket
from io import StringIO

import pytest

from policies.sla.parse import default_config, parse
from router.operate.telemetry.logs import Notices
from router.start.app import Router
from router.start.commands.greeting import example, greet
from router.terminal import inert_console
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer


def file_of(*pools: str) -> str:
    return (
        "tenants: {a: {anonymous: true}}\npools:\n"
        + "".join(f"  {pool}\n" for pool in pools)
        + 'server: {http: "127.0.0.1:0", grpc: "off"}\n'
    )


def a_closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def until(shown: StringIO, words: str) -> str:
    """What was printed, as soon as `words` are among it."""
    async with asyncio.timeout(30):
        while words not in shown.getvalue():  # noqa: ASYNC110 - a console has no events
            await asyncio.sleep(0.01)
    return shown.getvalue()


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        ('far: {kind: vllm, at: ["http://127.0.0.1:PORT"], model: m}', " at http://127.0.0.1:PORT: far-0"),
        ('far: {kind: shard, at: ["127.0.0.1:PORT"]}', " at 127.0.0.1:PORT: far-0"),
        ("far: {kind: shard, register: true}", ": none was found yet (backends that register)"),
        ('far: {kind: shard, at: ["dns://no.invalid:7001"]}', ": none was found yet (dns://no.invalid:7001"),
    ],
)
async def test_addresses_are_printed_while_no_backend_is_up_then_what_the_router_waits_for(
    pool: str, reason: str
) -> None:
    port = str(a_closed_port())
    config, shown = parse(file_of(pool.replace("PORT", port))), StringIO()
    async with Router(config) as router:
        greeting = asyncio.create_task(greet(Notices(inert_console(file=shown)), config, router, patience_s=0))
        said = await until(shown, "Waiting for pool 'far'")
        greeting.cancel()
    first, second, *_ = said.splitlines()
    assert (first, second) == ("Pointsman listens; Ctrl-C ends it", f"  HTTP  {router.http_url}/v1")
    assert f"Waiting for pool 'far'{reason.replace('PORT', port)}" in said
    assert "Pointsman serves" not in said, "a model that the file names is served only by a backend"


async def test_models_of_some_pools_are_named_beside_pools_that_the_router_waits_for() -> None:
    async with running(VLLMServer(model="qwen")) as engine:
        near, far = f'near: {{kind: vllm, at: ["{engine.url}"]}}', "far: {kind: shard, register: true}"
        config, shown = parse(file_of(near, far, 'lost: {kind: vllm, at: ["http://127.0.0.1:9"]}')), StringIO()
        async with Router(config) as router:
            while not router.models():
                await router.gateway.cluster.health_changed()
            greeting = asyncio.create_task(greet(Notices(inert_console(file=shown)), config, router, patience_s=0))
            said = await until(shown, "curl ")
            greeting.cancel()
    assert "Waiting for pool 'lost' at http://127.0.0.1:9" in said
    assert "Waiting for pool 'near'" not in said
    assert "Pointsman serves qwen\n" in said


async def test_the_models_follow_when_every_backend_is_there_and_no_line_is_broken() -> None:
    async with running(
        VLLMServer(model="a-model-with-a-name-that-is-longer-than-most-of-those-that-are-served")
    ) as engine:
        config, shown = parse(file_of(f'near: {{kind: vllm, at: ["{engine.url}"]}}')), StringIO()
        async with Router(config) as router:
            await greet(Notices(inert_console(file=shown, width=40)), config, router)
    assert "Waiting" not in shown.getvalue()
    (curl,) = (line for line in shown.getvalue().splitlines() if line.startswith("curl"))
    assert curl.endswith('"messages": [{"role": "user", "content": "Hello"}]}\'')


@pytest.mark.parametrize(("model", "is_told"), [("bundled", True), ("/models/own", False)])
async def test_the_bundled_model_is_called_what_it_is(model: str, is_told: bool) -> None:
    async with running(VLLMServer(model="m")) as engine:
        config = parse(file_of(f'near: {{kind: vllm, at: ["{engine.url}"]}}'))
        async with Router(config) as router:
            shown = "\n".join(example(default_config(model=model), router))
    assert ("copies facts" in shown) == is_told
