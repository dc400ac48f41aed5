"""A class that hedges, in front of two real vLLM of which one stands still: the other one answers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from router.start.app import Router
from shards.bundled.documents import prompt
from tests.engines.routed import SLA, Answer, Client, a_document, a_router, pool_of

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

HEDGED = SLA.replace("chat: {{}}", "chat: {{hedge: p95, hedge_budget: 100%}}")
PATIENT = dict.fromkeys(("probe_timeout", "suspect_after", "first_byte", "first_token", "between_tokens"), "10m")
"""A backend is neither suspected nor given up: only a second request answers in place of one that stands still."""

KNOWN = 10
"""Answers of an engine after which it is known when one is late: before the eighth, no second request is sent."""


async def answer_to(client: Client, number: int) -> Answer:
    """The answer to question `number`."""
    about = a_document(number, 200)
    return await client.chat(prompt(about.text, about.questions[0].question), stream=True, max_tokens=8)


def second_requests_that_won(router: Router) -> float:
    return router.telemetry.registry.get_sample_value("pointsman_events_total", {"event": "hedge_won"}) or 0.0


async def test_a_request_at_an_engine_that_stands_still_is_answered_by_the_other(engines: Engines) -> None:
    a, b = engines.vllm("a", "b")
    names = {"engines-0": a, "engines-1": b}
    async with a_router({**pool_of(a, b), "health": PATIENT}, HEDGED) as (client, router):
        usual: list[Answer] = []
        while any(sum(answer.backend == name for answer in usual) < KNOWN for name in names):
            assert len(usual) < 100, "one of the engines was asked nothing"
            # two at once, so that both engines have work
            pair = range(len(usual), len(usual) + 2)
            usual += await asyncio.gather(*(answer_to(client, number) for number in pair))
        won = second_requests_that_won(router)
        for number in range(12):
            # the same question goes where its prompt is cached, unless that engine looks slow on a busy machine
            holder = names[usual[number].backend]
            os.killpg(holder.pid, signal.SIGSTOP)
            try:
                again = await answer_to(client, number)
            finally:
                os.killpg(holder.pid, signal.SIGCONT)
            assert again.text == usual[number].text
            if second_requests_that_won(router) - won >= 2:
                break
        assert second_requests_that_won(router) - won >= 2
        router.check()
