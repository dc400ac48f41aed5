"""A real vLLM behind a router."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from router.fleet.feeds.health import FeedState
from router.start.app import Router
from shards.bundled.documents import prompt
from tests.engines.routed import Client, a_document, a_router, pool_of
from tests.shards.attached import eventually

if TYPE_CHECKING:
    from tests.engines.conftest import Engines


def feed_state(router: Router) -> list[FeedState]:
    return [health.state for health in router.gateway.feeds.health()]


async def a_conversation(client: Client, seed: int, *, stream: bool) -> None:
    about = a_document(seed)
    first, second = about.questions[:2]
    messages = [{"role": "user", "content": prompt(about.text, first.question)}]
    answer = await client.chat(messages, stream=stream)
    assert first.needle in answer.text
    assert answer.cached_tokens == 0
    assert not stream or answer.pieces > 1
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": second.question}]
    again = await client.chat(messages, stream=stream)
    assert second.needle in again.text
    # all full blocks of the first turn
    assert again.cached_tokens >= answer.usage["prompt_tokens"] // 32 * 32


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_goes_through_and_its_second_turn_finds_the_first_one_cached(
    engines: Engines, stream: bool
) -> None:
    (vllm,) = engines.vllm("a")
    async with a_router(pool_of(vllm)) as (client, router):
        await a_conversation(client, 1 + stream, stream=stream)
        router.check()


async def test_what_its_cache_holds_is_heard_and_forgotten_when_it_is_cleared(engines: Engines) -> None:
    (vllm,) = engines.vllm("a")
    async with a_router(pool_of(vllm)) as (client, router):
        await eventually(lambda: feed_state(router) == [FeedState.LIVE])
        (before,) = router.gateway.feeds.health()
        about = a_document(3)
        await client.chat(prompt(about.text, about.questions[0].question))
        index = router.gateway.beliefs.index
        await eventually(lambda: len(index) >= 8)
        (after,) = router.gateway.feeds.health()
        assert after.counts.undecodable == before.counts.undecodable == 0
        vllm.forget_prefixes()
        # it says so with its next step
        await client.chat("Hello", max_tokens=1)
        await eventually(lambda: len(index) == 0)


async def test_what_it_refuses_reaches_the_client_in_its_own_words(engines: Engines) -> None:
    (vllm,) = engines.vllm("a")
    async with a_router(pool_of(vllm)) as (client, _):
        body = {"model": "pointsman-reader", "messages": [{"role": "user", "content": "Hello"}], "top_p": 7}
        status, reply = await client.post("/v1/chat/completions", body)
        assert status == 400
        assert "top_p" in reply["error"]["message"]
