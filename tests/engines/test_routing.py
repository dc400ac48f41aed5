"""Two real vLLM: prompts go to the cache that holds their beginning."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from shards.bundled.documents import prompt
from tests.engines.routed import Answer, Client, a_document, a_router, pool_of

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

LONG = 2000
"""Tokens of a document. On a busy machine an engine may look several times slower than the other one; computing a short
document there would be faster, and right."""


async def answer_to(client: Client, number: int, question: int) -> Answer:
    """The right answer to a question about document `number`."""
    about = a_document(100 + number, LONG)
    answer = await client.chat(prompt(about.text, about.questions[question].question))
    assert about.questions[question].needle in answer.text
    return answer


@pytest.mark.parametrize("events", [True, False], ids=["with events", "without events"])
async def test_a_document_is_computed_once_and_both_engines_get_some(engines: Engines, events: bool) -> None:
    vllms = engines.vllm("a", "b")
    pool = pool_of(*vllms)
    if not events:
        pool["options"] = {"events": "none"}
    async with a_router(pool) as (client, router):
        homes = []
        for number in range(0, 8, 2):
            # two at once, so that both engines have work
            pair = await asyncio.gather(*(answer_to(client, at, 0) for at in (number, number + 1)))
            homes += [answer.backend for answer in pair]
        assert len(set(homes)) == 2
        for question in (1, 2):
            for number, home in enumerate(homes):
                answer = await answer_to(client, number, question)
                assert answer.backend == home
                assert answer.cached_tokens >= 0.8 * answer.usage["prompt_tokens"]
        router.check()
