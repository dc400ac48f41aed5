"""A server that answers its probes and hangs with requests keeps none of them for longer than their timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from policies.sla.parse import parse
from router.start.app import Router
from tests.shards.attached import eventually
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running

SLA = """
classes: {{chat: {{ttft_p95: 50ms}}}}
pools:
  own:
    kind: openai_compatible
    model: m
    at: {at}
    health: {{probe_every: 200ms, first_byte: 300ms..1h, first_token: 600ms..1h, between_tokens: 600ms..1h}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""
# A router that did not learn how fast these servers answer would wait for an hour, and the test end at its limit.


@dataclass(eq=False)
class Hanging(OpenAIServer):
    """Answers `/v1/models` always. `hangs`: it answers a chat with nothing at all, or with a head alone."""

    hangs: str | None = None

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if self.hangs == "at the head":
            await self.begin(request)
        if self.hangs is not None:
            await self.seen(request)
            with self.generating():
                await asyncio.Event().wait()
        return await super().complete(request)


@dataclass
class Fleet:
    """A router in front of two servers, and a client."""

    router: Router
    servers: list[Hanging]
    http: aiohttp.ClientSession

    async def ask(self, number: int) -> tuple[str, str]:
        """The backend, and the body of the answer."""
        messages = [{"role": "user", "content": f"Question {number}"}]
        body = {"model": "m", "messages": messages, "max_tokens": 8, "stream": True}
        async with self.http.post(f"{self.router.http_url}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return answer.headers["x-pointsman-backend"], text

    async def asked(self, requests: int) -> list[tuple[str, str]]:
        return await asyncio.gather(*map(self.ask, range(requests)))


@asynccontextmanager
async def a_fleet() -> AsyncIterator[Fleet]:
    """Both servers have answered often enough for their times to be known."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(running(Hanging(delay_s=0.002))) for _ in range(2)]
        router = await stack.enter_async_context(Router(parse(SLA.format(at=[server.url for server in servers]))))
        assert await router.wait_until_reached(20)
        fleet = Fleet(router, servers, await stack.enter_async_context(aiohttp.ClientSession()))
        async with asyncio.timeout(30):
            while min(len(server.received) for server in servers) < 40:
                await fleet.asked(8)
        yield fleet
        router.check()
        await eventually(lambda: not any(server.open_requests for server in servers))


@pytest.mark.parametrize("how", ["before any byte", "at the head"])
async def test_requests_that_hang_are_answered_by_the_other_server(how: str) -> None:
    async with a_fleet() as fleet:
        fleet.servers[0].hangs = how
        before = len(fleet.servers[0].received)
        answers = await fleet.asked(16)
        assert len(fleet.servers[0].received) > before, "it had some of them"
        for later in range(10):
            answers.append(await fleet.ask(later))
        assert {name for name, _ in answers} == {"own-1"}
        fleet.servers[0].hangs = None


async def test_a_request_that_hangs_alone_is_answered_by_the_other_server_and_its_own_stays_in_use() -> None:
    async with a_fleet() as fleet:
        slow, other = fleet.servers
        other.is_ill, slow.hangs = True, "before any byte"
        hung = asyncio.create_task(fleet.ask(0))
        await eventually(lambda: slow.open_requests or hung.done())
        slow.hangs = None
        name, _ = await hung
        assert name == "own-1"
        assert {backend for backend, _ in await fleet.asked(16)} == {"own-0", "own-1"}


async def test_a_stream_that_hangs_between_two_tokens_ends() -> None:
    async with a_fleet() as fleet:
        for server in fleet.servers:
            server.hangs_after = 2
        answers = await fleet.asked(8)
        assert all('"error"' in text for _, text in answers)
