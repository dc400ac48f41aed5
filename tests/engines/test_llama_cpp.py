"""llama.cpp's own server behind a router."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shards.bundled import NAME
from shards.bundled.documents import prompt
from tests.engines.routed import a_document, a_router

if TYPE_CHECKING:
    from tests.engines.conftest import Engines


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_goes_through_and_its_second_turn_finds_the_first_one_in_its_slot(
    engines: Engines, stream: bool
) -> None:
    llama = engines.llama_server()
    async with a_router({"kind": "llama_cpp", "at": [llama.url], "model": NAME}) as (client, router):
        about = a_document(10 + stream)
        first, second = about.questions[:2]
        messages = [{"role": "user", "content": prompt(about.text, first.question)}]
        answer = await client.chat(messages, stream=stream)
        assert first.needle in answer.text
        assert not stream or answer.pieces > 1
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": second.question}]
        again = await client.chat(messages, stream=stream)
        assert second.needle in again.text
        assert again.cached_tokens >= answer.usage["prompt_tokens"] - 1
        router.check()


async def test_a_prompt_longer_than_a_slot_is_refused_and_not_cut(engines: Engines) -> None:
    llama = engines.llama_server()
    async with a_router({"kind": "llama_cpp", "at": [llama.url], "model": NAME}) as (client, _):
        body = {"model": NAME, "messages": [{"role": "user", "content": "gate " * 4000}]}
        status, reply = await client.post("/v1/chat/completions", body)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


async def test_its_load_and_its_slots_are_read(engines: Engines) -> None:
    llama = engines.llama_server()
    async with a_router({"kind": "llama_cpp", "at": [llama.url], "model": NAME}) as (_, router):
        cluster = router.gateway.cluster
        (name,) = cluster.names()
        (seen,) = cluster.view(router.gateway.clock()).backends
        assert cluster.backend(name).describe().context_tokens == 2560
        assert (seen.running, seen.max_requests) == (0, 2)
