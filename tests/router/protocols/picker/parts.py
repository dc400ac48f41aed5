"""A router with an endpoint picker, in front of real servers that stand in for engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from backends.http.backend import HttpBackend
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from policies.health import HealthRules
from policies.sla.config import Config
from router.start.app import Router
from tests.router.parts import KEY, MODEL, a_config
from tests.standins.envoy import Envoy, Reply
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import StandIn, running

AUTH = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
CHAT = "/v1/chat/completions"


def a_backend(engine: StandIn, number: int = 0, **options: Any) -> HttpBackend:
    return OpenAICompatible(f"b{number}", engine.url, pool="own", options=OpenAIOptions(**options))


def a_picker_config(**server: Any) -> Config:
    return a_config(picker="127.0.0.1:0", **server)


@asynccontextmanager
async def picking(backends: Sequence[Any], config: Config | None = None) -> AsyncIterator[tuple[Envoy, Router]]:
    """A gateway in front of a router that has reached `backends`; nothing is left of any request on the way out."""
    rules = HealthRules(probe_every_s=0.05)
    router = Router(config or a_picker_config(), backends=lambda _: backends, health=rules)
    async with router:
        assert await router.wait_until_reached(5)
        yield Envoy(str(router.picker)), router
        assert await router.gateway.doors.emptied(5)
        router.check()


@asynccontextmanager
async def a_gateway(
    *engines: StandIn, config: Config | None = None, **options: Any
) -> AsyncIterator[tuple[Envoy, Router]]:
    """The same, with one backend of OpenAI's dialect for each of `engines`; one without any."""
    async with AsyncExitStack() as stack:
        run = [await stack.enter_async_context(running(engine)) for engine in engines or (OpenAIServer(model=MODEL),)]
        backends = [a_backend(engine, number, **options) for number, engine in enumerate(run)]
        yield await stack.enter_async_context(picking(backends, config))


def a_chat(text: str = "hello", **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}).encode()


async def chat(envoy: Envoy, body: bytes | None = None, headers: Mapping[str, str] = AUTH, path: str = CHAT) -> Reply:
    async with asyncio.timeout(10):
        return await envoy.post(path, a_chat() if body is None else body, headers)


def endpoint(engine: StandIn) -> str:
    return engine.url.removeprefix("http://")
