"""Two real vLLM: one computes prompts, the other fetches their KV through NIXL and answers. Either may die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.engines.apart import a_question, a_router, file_of, is_there, nixl, warmed
from tests.engines.programs import VLLM, a_vllm, free_ports
from tests.engines.routed import Client
from tests.shards.attached import eventually

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

PHASES = ("stopped_before", "killed_before", "killed_after_the_first_leg")
"""How long each may take is for tests/router/call/test_prefill.py, in virtual time."""


@pytest.fixture(scope="module")
def engines_apart(engines: Engines) -> Iterator[tuple[VLLM, VLLM]]:
    """The one that computes prompts, and the one that answers; started side by side."""
    if not is_there():
        pytest.skip("there is no nixl, which moves KV between engines")
    ports = free_ports(2)
    options = [nixl(port) for port in ports]
    prompts, answers = (a_vllm(f"nixl-{at}", engines.folder, each) for at, each in enumerate(options))
    try:
        prompts.start()
        answers.start()
        prompts.wait_until_ready()
        answers.wait_until_ready()
        for each in (prompts, answers):
            # the first request compiles what the others use
            warmed(each)
        yield prompts, answers
    finally:
        prompts.stop()
        answers.stop()


@pytest.fixture
def pair(engines_apart: tuple[VLLM, VLLM]) -> tuple[VLLM, VLLM]:
    """Both, also after a test that killed the one that computes prompts."""
    prompts, _ = engines_apart
    if not prompts.is_started:
        prompts.start()
        prompts.wait_until_ready()
    return engines_apart


async def test_answers_are_those_of_a_single_engine_and_kv_is_transferred(pair: tuple[VLLM, VLLM]) -> None:
    """On a machine with few cores UCX's polling threads may hold a transfer up for seconds: then the router goes on
    without it, and the answers are equal all the same.

    The router has KV fetched once, and for the prompt that it was computed for (tests/router/call/test_prefill.py). An
    answer that differs is of KV that was overwritten before it was fetched, since its lease had ended: with a block of
    another prompt as its last one, the second question is answered with "I is 3066.". The engines count such transfers.
    """
    prompts, answers = pair
    questions = [a_question(number) for number in range(12)]
    async with a_router(file_of(prompts, [answers])) as (client, router):
        through = await asyncio.gather(*(client.chat(each, stream=at % 2 == 0) for at, each in enumerate(questions)))
        router.check()
    await eventually(lambda: answers.metric("vllm:nixl_bytes_transferred_sum") > 0, within_s=60)
    answers.forget_prefixes()
    async with aiohttp.ClientSession() as http:
        alone = Client(http, answers.url)
        single = [await alone.chat(question) for question in questions]
    counted = {
        "failed": answers.metric("vllm:nixl_num_failed_transfers_total"),
        "expired": prompts.metric("vllm:nixl_num_kv_expired_reqs_total"),
        "fetched after that": prompts.metric("vllm:nixl_num_notifications_after_expiry_total"),
    }
    assert [answer.text for answer in through] == [answer.text for answer in single], counted
    assert [answer.usage["prompt_tokens"] for answer in through] == [one.usage["prompt_tokens"] for one in single]


@pytest.mark.parametrize("phase", PHASES)
async def test_without_the_engine_that_computes_prompts_the_other_one_does(
    pair: tuple[VLLM, VLLM], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    prompts, answers = pair
    question = a_question(100 + len(phase))
    async with a_router(file_of(prompts, [answers])) as (client, router):
        first = router.gateway.first_legs.run
        if phase == "stopped_before":
            os.killpg(prompts.pid, signal.SIGSTOP)
        elif phase == "killed_before":
            prompts.kill()
        else:

            async def then_killed(*args: object) -> object:
                done = await first(*args)  # type: ignore[arg-type]
                prompts.kill()
                return done

            monkeypatch.setattr(type(router.gateway.first_legs), "run", lambda _, *args: then_killed(*args))
        try:
            answer = await client.chat(question)
            assert answer.usage["prompt_tokens"] > 100
            router.check()
        finally:
            monkeypatch.undo()
            if phase == "stopped_before":
                os.killpg(prompts.pid, signal.SIGCONT)
            else:
                # the first leg may have been given up before it was killed
                prompts.kill()
