"""A request that makes engines answer 500 is to blame itself: no backend is ill, and other tenants are served."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from policies.sla.parse import parse
from router.start.app import Router
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import running

SLA = """
classes: {{chat: {{}}}}
tenants:
  good: {{keys: ["{good}"]}}
  bad: {{keys: ["{bad}"]}}
pools: {{own: {{kind: openai_compatible, model: m, at: {at}}}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""


@dataclass(eq=False)
class Fragile(OpenAIServer):
    """Answers 500 to a grammar, as vLLM 0.32 does to one that never ends."""

    errors: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "structured_outputs" in body:
            self.errors += 1
            return self.error(500, "Internal server error")
        return await super().complete(request)


@dataclass
class Tenant:
    """A client with the key of its name."""

    http: aiohttp.ClientSession
    url: str
    name: str

    async def ask(self, text: str, **more: Any) -> tuple[int, Any]:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}
        headers = {"authorization": f"Bearer {self.name}-key"}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def poison(self, text: str) -> tuple[int, Any]:
        return await self.ask(text, structured_outputs={"grammar": "root ::= root"})


@asynccontextmanager
async def three_servers() -> AsyncIterator[tuple[Router, list[Fragile], Tenant, Tenant]]:
    """A router, its servers, and the tenants `good` and `bad`; each server has answered `good` before."""
    keys = {name: "sha256:" + hashlib.sha256(f"{name}-key".encode()).hexdigest() for name in ("good", "bad")}
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(running(Fragile())) for _ in range(3)]
        sla = SLA.format(at=[server.url for server in servers], **keys)
        router = await stack.enter_async_context(Router(parse(sla)))
        assert await router.wait_until_reached(10)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        good, bad = (Tenant(http, router.http_url, name) for name in ("good", "bad"))
        numbers = itertools.count()
        async with asyncio.timeout(20):
            while not all(server.received for server in servers):
                await asyncio.gather(*(good.ask(f"Question {next(numbers)}") for _ in range(6)))
        yield router, servers, good, bad


def ill(router: Router) -> list[str]:
    cluster = router.gateway.cluster
    return [name for name in cluster.names() if cluster.is_ill(name)]


async def test_a_request_that_failed_at_backends_that_serve_others_is_refused_when_it_comes_again() -> None:
    async with three_servers() as (router, servers, good, bad):
        status, _ = await bad.poison("the same")
        assert status == 502
        errors = sum(server.errors for server in servers)
        assert errors == 3, "nothing shows yet that the backends are not broken"
        for number in range(12):
            assert (await good.ask(f"question {number}"))[0] == 200
        status, answer = await bad.poison("the same")
        assert status == 502
        assert "two backends failed at this request and serve others" in answer["error"]["message"]
        assert sum(server.errors for server in servers) == errors, "it was sent nowhere"
        assert (await bad.ask("the same"))[0] == 200, "another request of that tenant"
        assert (await good.ask("the same"))[0] == 200
        assert not ill(router)
        router.check()


async def test_a_tenant_with_many_requests_that_fail_makes_no_backend_ill_beside_one_that_is_served() -> None:
    async with three_servers() as (router, servers, good, bad):
        for number in range(20):
            failed, served = await asyncio.gather(
                asyncio.gather(*(bad.poison(f"poison {number} {part}") for part in range(4))),
                good.ask(f"question {number}"),
            )
            assert {status for status, _ in failed} == {502}
            assert served[0] == 200
            assert not ill(router)
        # those that one backend served others after are tried at two
        assert 2 * 80 <= sum(server.errors for server in servers) <= 3 * 80
        router.check()


async def test_servers_that_fail_at_everything_are_ill_all_the_same() -> None:
    async with three_servers() as (router, servers, good, _):
        for server in servers[:2]:
            server.refusal = lambda *_, server=server: server.error(500, "CUDA error")  # type: ignore[method-assign]
        async with asyncio.timeout(20):
            for number in itertools.count():
                # the third one answers all of them
                assert (await good.ask(f"question {number}"))[0] == 200
                if len(ill(router)) == 2:
                    break
        router.check()
