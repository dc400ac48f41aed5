"""One model name, one SLA file, engines of five kinds: each of them is killed while requests run, and none is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from policies.sla.parse import parse
from router.start.app import Router
from shards.engine import Engine, EngineOptions
from shards.server import ServerOptions, ShardServer
from tests.e2e.cluster import MODEL, bundled_model
from tests.standins.llama_cpp import LlamaCppServer
from tests.standins.lmdeploy import LMDeployServer
from tests.standins.ollama import OllamaServer
from tests.standins.standin import StandIn, running
from tests.standins.tgi import TGIServer

SLA = """
classes: {chat: {}}
pools:
  own:  {kind: shard, at: ["${env:OWN}"], health: {probe_every: 50ms, retry: 100ms, slow_start: 100ms}}
  llama: {kind: llama_cpp, at: ["${env:LLAMA}"], models: {MODEL: m}, health: {probe_every: 50ms, retry: 100ms}}
  desk: {kind: ollama, at: ["${env:DESK}"], models: {MODEL: m}, health: {probe_every: 50ms, retry: 100ms}}
  tgi:  {kind: tgi, at: ["${env:TGI}"], models: {MODEL: m}, health: {probe_every: 50ms, retry: 100ms}}
  lm:   {kind: lmdeploy, register: true, models: {MODEL: m}, health: {probe_every: 50ms, retry: 100ms}}
rules: [{class: chat}]
policies:
  default: {filter: [healthy, serves_model, under_limit], score: {turn: 1}, pick: best}
server: {http: "127.0.0.1:0", grpc: off, admin: "127.0.0.1:0", drain: 1s}
""".replace("MODEL", MODEL)


@dataclass
class Fleet:
    """A router in front of one engine of each kind; `kill` ends one of them at once."""

    router: Router
    kill: dict[str, Callable[[], Awaitable[None]]]
    http: aiohttp.ClientSession
    answered_by: list[str] = field(default_factory=list)

    async def ask(self, number: int) -> str:
        """The end of one call: whole, broken (after its answer had begun), or lost with the reason."""
        streams = number % 2 == 0
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"question {number}"}],
            "max_tokens": 24,
            "stream": streams,
        }
        async with self.http.post(f"{self.router.http_url}/v1/chat/completions", json=body) as reply:
            content = (await reply.read()).decode()
            if reply.status != 200:
                return f"lost: {reply.status} {content[:300]}"
            self.answered_by.append(reply.headers["x-pointsman-backend"].partition("@")[0].partition("-")[0])
        if not streams:
            return "whole" if json.loads(content)["choices"][0]["message"]["content"] else "lost: empty"
        if content.endswith("data: [DONE]\n\n"):
            return "whole"
        return "broken" if '"content":' in content else f"lost: {content[:300]}"


@asynccontextmanager
async def a_fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        shard = ShardServer(
            Engine(bundled_model(), EngineOptions(kv_blocks=512)),
            "127.0.0.1:0",
            ServerOptions(shard="own-0", grace_s=0),
        )
        await shard.start()
        own = await stack.enter_async_context(AsyncExitStack())
        own.push_async_callback(shard.close)
        # closed once, by the test or at the end
        kill: dict[str, Callable[[], Awaitable[None]]] = {"own": own.aclose}
        urls: dict[str, str] = {}
        engines: dict[str, StandIn] = {
            "llama": LlamaCppServer(delay_s=0.01),
            "desk": OllamaServer(delay_s=0.01),
            "tgi": TGIServer(delay_s=0.01),
            "lm": LMDeployServer(delay_s=0.01),
        }
        for name, engine in engines.items():
            its = await stack.enter_async_context(AsyncExitStack())
            urls[name] = (await its.enter_async_context(running(engine))).url
            kill[name] = its.aclose
        places = {"OWN": shard.address, "LLAMA": urls["llama"], "DESK": urls["desk"], "TGI": urls["tgi"]}
        router = await stack.enter_async_context(Router(parse(SLA, environment=places)))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        announcement = {"url": urls["lm"], "status": {"models": ["m"]}}
        async with http.post(f"http://{router.admin}/nodes/add", json=announcement) as reply:
            assert reply.status == 200
        async with asyncio.timeout(30):
            while not (router.gateway.is_ready() and len(router.gateway.cluster.pools_ready()) == 5):
                await router.gateway.cluster.health_changed()
        yield Fleet(router, kill, http)
        router.check()


@pytest.mark.parametrize("victim", ["own", "llama", "desk", "tgi", "lm"])
async def test_any_engine_of_a_mixed_fleet_may_die_and_no_request_is_lost_that_had_not_streamed(victim: str) -> None:
    async with a_fleet() as fleet:
        calls: list[asyncio.Task[str]] = []
        for number in range(120):
            calls.append(asyncio.create_task(fleet.ask(number)))
            if number == 40:
                await fleet.kill[victim]()
            await asyncio.sleep(0.01)
        ends = await asyncio.gather(*calls)
        lost = [end for end in ends if end.startswith("lost")]
        assert not lost, f"{len(lost)} lost, the first: {lost[0]}"
        assert ends.count("whole") >= 100
        assert set(fleet.answered_by) == {"own", "llama", "desk", "tgi", "lm"}, "every kind answers for the one model"
        assert not fleet.router.gateway.cluster.pools_ready()[victim]
