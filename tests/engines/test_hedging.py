"""A class that hedges, in front of two real vLLM of which one stands still: the other one answers."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from shards.bundled.documents import prompt
from tests.engines.routed import SLA, Client, a_document, a_router, pool_of

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

HEDGED = SLA.replace("chat: {{}}", "chat: {{hedge: p95, hedge_budget: 100%}}")


async def seconds_of(client: Client, number: int) -> tuple[float, str, str]:
    """How long an answer to question `number` took, which it was, and from which backend."""
    about = a_document(number, 200)
    question = prompt(about.text, about.questions[0].question)
    began_at = time.monotonic()
    answer = await client.chat(question, stream=True, max_tokens=8)
    return time.monotonic() - began_at, answer.text, answer.backend


async def test_a_request_at_an_engine_that_stands_still_is_answered_by_the_other(engines: Engines) -> None:
    a, b = engines.vllm("a", "b")
    names = {"engines-0": a, "engines-1": b}
    async with a_router(pool_of(a, b), HEDGED) as (client, router):
        usual = [await seconds_of(client, number) for number in range(30)]
        assert {backend for _, _, backend in usual} == set(names), "both are known by now"
        answered_by_other = 0
        for number in range(4):
            # the same question goes where its prompt is cached
            _, text, holder = usual[number]
            os.killpg(names[holder].pid, signal.SIGSTOP)
            try:
                seconds, again, backend = await seconds_of(client, number)
            finally:
                os.killpg(names[holder].pid, signal.SIGCONT)
            assert again == text
            # earlier than a suspicion, which takes 3 s
            assert seconds < 2.5
            answered_by_other += backend != holder
        assert answered_by_other >= 2
        router.check()
