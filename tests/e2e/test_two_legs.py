"""SGLang and TensorRT-LLM with prefill and decode apart, over HTTP: stand-ins from their documented wire formats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from policies import prefill
from policies.sla.parse import parse
from router.start.app import Router
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.sglang import Room, SGLangServer
from tests.standins.standin import TEXT, running
from tests.standins.tensorrt_llm import TensorRTLLMServer

SLA = """
classes: {{chat: {{}}}}
pools:
  answers: {{kind: {kind}, at: [{answers}], model: m, prefill: prompts}}
  prompts: {{kind: {kind}, at: [{prompts}], model: m}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""


@dataclass
class Apart:
    """A router in front of servers that compute `prompts` and servers that give `answers`."""

    router: Router
    http: aiohttp.ClientSession
    prompts: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    async def ask(self, **fields: Any) -> tuple[int, Any]:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, **fields}
        async with self.http.post(f"{self.router.http_url}/v1/chat/completions", json=body) as reply:
            return reply.status, await reply.json()


@asynccontextmanager
async def apart(kind: str, prompts: list[OpenAIServer], answers: list[OpenAIServer]) -> AsyncIterator[Apart]:
    async with AsyncExitStack() as stack:
        for server in (*prompts, *answers):
            await stack.enter_async_context(running(server))
        places = [", ".join(f'"{server.url}"' for server in pool) for pool in (answers, prompts)]
        sla = parse(SLA.format(kind=kind, answers=places[0], prompts=places[1]))
        router = await stack.enter_async_context(Router(sla))
        assert await router.wait_until_reached(timeout_s=20)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Apart(router, http, prompts, answers)
        router.check()
        assert not any(server.open_requests for server in (*prompts, *answers))


def sglang(**prefill_: Any) -> tuple[list[OpenAIServer], list[OpenAIServer]]:
    rooms: dict[int, Room] = {}
    prompts = [SGLangServer(mode="prefill", rooms=rooms, prefill_s=0.02, **prefill_) for _ in range(2)]
    return list(prompts), [SGLangServer(mode="decode", rooms=rooms) for _ in range(2)]


async def test_each_request_to_sglang_meets_its_prompt_in_a_room() -> None:
    async with apart("sglang", *sglang()) as both:
        replies = await asyncio.gather(*(both.ask() for _ in range(20)))
        assert {(status, reply["choices"][0]["message"]["content"]) for status, reply in replies} == {(200, TEXT)}
        rooms = [
            sorted(each.body["bootstrap_room"] for server in servers for each in server.received)
            for servers in (both.prompts, both.answers)
        ]
        assert rooms[0] == rooms[1]
        assert len(set(rooms[0])) == 20


async def test_where_one_sglang_fails_at_prompts_the_other_one_computes_them() -> None:
    prompts, answers = sglang()
    prompts[0].breaks = True  # type: ignore[attr-defined]
    async with apart("sglang", prompts, answers) as both:
        replies = [await both.ask() for _ in range(6)]
        assert [status for status, _ in replies] == [200] * 6
        assert len(prompts[1].received) == 6


async def test_a_client_is_told_what_sglang_apart_cannot_do() -> None:
    async with apart("sglang", *sglang()) as both:
        status, reply = await both.ask(n=2)
        assert status == 400
        assert "computed apart from their answers" in reply["error"]["message"]
        assert "`n`: 1" in reply["error"]["message"]


async def test_tensorrt_llm_continues_what_its_context_server_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "WORTH", -1e9)
    kept: set[int] = set()
    context, generation = TensorRTLLMServer(kept=kept), TensorRTLLMServer(kept=kept)
    async with apart("tensorrt_llm", [context], [generation]) as both:
        status, reply = await both.ask()
        assert (status, reply["choices"][0]["message"]["content"]) == (200, TEXT)
    (first,), (second,) = context.received, generation.received
    assert first.body["disaggregated_params"] == {"request_type": "context_only"}
    assert second.body["disaggregated_params"]["request_type"] == "generation_only"
    assert second.body["disaggregated_params"]["ctx_request_id"] == 1
    assert kept == set(), "the KV was fetched"


async def test_a_generation_server_computes_a_prompt_whose_kv_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "WORTH", -1e9)
    # they share nothing, so that nothing that the first one keeps can be fetched
    context, generation = TensorRTLLMServer(), TensorRTLLMServer()
    async with apart("tensorrt_llm", [context], [generation]) as both:
        status, reply = await both.ask()
        assert (status, reply["choices"][0]["message"]["content"]) == (200, TEXT)
    assert ["disaggregated_params" in each.body for each in generation.received] == [True, False]
