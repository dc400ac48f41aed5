"""A real vLLM of two data-parallel ranks behind a router, which chooses the rank."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from backends.http.backend import HttpBackend
from policies.errors import BackendRefused, InvalidRequest
from policies.nouns import Prompt, Request
from shards.bundled import NAME
from shards.bundled.documents import prompt
from tests.engines.programs import VLLM, VLLMOptions
from tests.engines.routed import a_document, a_router
from tests.shards.attached import eventually

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

TWO = VLLMOptions(extra=("--data-parallel-size", "2", "--api-server-count", "1"))


@pytest.fixture(scope="module")
def vllm(engines: Engines) -> VLLM:
    (vllm,) = engines.vllm("ranks", options=TWO)
    return vllm


def pool_of(vllm: VLLM) -> dict[str, object]:
    return {"kind": "vllm", "at": [vllm.url], "model": NAME, "health": {"probe_every": "200ms"}}


async def test_each_rank_is_a_backend_and_its_cache_is_found_again(vllm: VLLM) -> None:
    async with a_router(pool_of(vllm)) as (client, router):
        await eventually(lambda: len(router.gateway.cluster.names()) == 2)
        texts = [prompt(about.text, about.questions[0].question) for about in map(a_document, range(60, 68))]
        # two at once, so that both ranks have work
        first = [
            await asyncio.gather(*(client.chat(text, max_tokens=4) for text in pair))
            for pair in zip(*[iter(texts)] * 2, strict=True)
        ]
        homes = [answer.backend for pair in first for answer in pair]
        assert set(homes) == {"engines-0", "engines-0/1"}
        again = [await client.chat(text, max_tokens=4) for text in texts]
        assert [answer.backend for answer in again] == homes
        assert all(answer.cached_tokens > 600 for answer in again)
        loads = [router.gateway.cluster.backend(name).load() for name in router.gateway.cluster.names()]
        assert all(load.free_tokens for load in loads)
        router.check()


async def test_events_of_each_rank_are_those_of_its_backend(vllm: VLLM) -> None:
    async with a_router(pool_of(vllm)) as (client, router):
        await eventually(
            lambda: {str(health.source) for health in router.gateway.feeds.health()} == {"engines-0", "engines-0/1"}
        )
        index = router.gateway.beliefs.index
        for seed in range(70, 78):
            about = a_document(seed)
            await client.chat(prompt(about.text, about.questions[0].question), max_tokens=4)
        await eventually(lambda: len(index) >= 8 * 8)
        router.check()


async def test_a_rank_that_the_server_does_not_have_is_refused(vllm: VLLM) -> None:
    async with a_router(pool_of(vllm)) as (_, router):
        await eventually(lambda: len(router.gateway.cluster.names()) == 2)
        backend = router.gateway.cluster.backend("engines-0")
        assert isinstance(backend, HttpBackend)
        third = backend._rank(2)
        body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        request = Request("r", "acme", NAME, "acme", 1, 1, "chat")
        with pytest.raises((InvalidRequest, BackendRefused), match="out of range"):
            async for _ in third.generate(request, Prompt(body=body)):
                pass
