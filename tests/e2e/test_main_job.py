"""The main job, on real parts: a prompt goes in, tokens stream out."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio

from router.protocols.grpc.v1 import inference_pb2 as wire
from router.protocols.grpc.v1 import inference_pb2_grpc as services
from shards.bundled.documents import Document, document, facts_within, prompt
from tests.e2e.cluster import KEYS, MODEL, TWO_TENANTS, Whole, a_whole

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Whole]:
    async with a_whole() as whole:
        yield whole
        await whole.check_idle()


@dataclass(frozen=True)
class Answer:
    text: str
    backend: str
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str


def a_document(seed: int, tokens: int = 700) -> Document:
    return document(random.Random(seed), facts_within(tokens))


@functools.cache
def a_client() -> openai.AsyncOpenAI:
    """One client for all tests: making one takes a tenth of a second."""
    return openai.AsyncOpenAI(base_url="http://to-be-chosen/v1", api_key="to-be-chosen", max_retries=0)


def client_of(whole: Whole, tenant: str = "acme") -> openai.AsyncOpenAI:
    return a_client().with_options(base_url=f"{whole.router.http_url}/v1", api_key=KEYS[tenant])


async def ask(whole: Whole, text: str, tenant: str = "acme", **more: Any) -> Answer:
    raw = await client_of(whole, tenant).chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=48, **more
    )
    body = raw.parse()
    assert body.usage is not None
    assert body.usage.prompt_tokens_details is not None
    return Answer(
        body.choices[0].message.content or "",
        raw.headers["x-pointsman-backend"],
        body.usage.prompt_tokens,
        body.usage.prompt_tokens_details.cached_tokens or 0,
        body.choices[0].finish_reason,
    )


async def test_the_bundled_model_answers_from_the_document(whole: Whole) -> None:
    paper = a_document(1)
    for question in paper.questions[::10]:
        answer = await ask(whole, prompt(paper.text, question.question))
        assert question.needle in answer.text
        assert answer.finish_reason == "stop"


async def test_streamed_text_equals_whole_text_and_ends_with_usage(whole: Whole) -> None:
    paper = a_document(2)
    text = prompt(paper.text, paper.questions[3].question)
    expected = await ask(whole, text)
    stream = await client_of(whole).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == expected.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_a_second_question_finds_the_document_where_it_lives(whole: Whole) -> None:
    paper = a_document(3, tokens=1800)
    first = await ask(whole, prompt(paper.text, paper.questions[5].question))
    second = await ask(whole, prompt(paper.text, paper.questions[90].question))
    assert first.cached_tokens == 0
    assert second.cached_tokens >= 0.9 * second.prompt_tokens
    assert second.backend == first.backend


async def test_tenants_share_nothing(whole: Whole) -> None:
    paper = a_document(4)
    text = prompt(paper.text, paper.questions[0].question)
    await ask(whole, text, tenant="acme")
    assert (await ask(whole, text, tenant="labs")).cached_tokens == 0


async def test_tenants_share_what_the_file_says() -> None:
    sla = TWO_TENANTS.replace("labs: {", "labs: {cache: {share_with: [acme]}, ")
    async with a_whole(1, sla=sla) as whole:
        paper = a_document(5)
        text = prompt(paper.text, paper.questions[0].question)
        first = await ask(whole, text, tenant="acme")
        second = await ask(whole, text, tenant="labs")
        assert second.text == first.text
        assert second.cached_tokens >= 0.9 * second.prompt_tokens


async def test_grpc_answers_the_same(whole: Whole) -> None:
    paper = a_document(6)
    text = prompt(paper.text, paper.questions[7].question)
    expected = await ask(whole, text)
    request = wire.GenerateRequest(
        model=MODEL,
        chat=wire.Messages(messages=[wire.Message(role="user", content=text)]),
        sampling=wire.Sampling(temperature=0, max_tokens=48),
    )
    async with grpc.aio.insecure_channel(str(whole.router.grpc_address)) as channel:
        call = services.InferenceStub(channel).Generate(request, metadata=[("authorization", f"Bearer {KEYS['acme']}")])
        replies = [reply async for reply in call]
    assert "".join(reply.text for reply in replies) == expected.text
    placed = next(reply.placement for reply in replies if reply.HasField("placement"))
    assert placed.backend == expected.backend
    assert replies[-1].usage.cached_tokens >= 0.9 * replies[-1].usage.prompt_tokens


async def test_sixty_four_streams_at_once_are_all_answered_in_full(whole: Whole) -> None:
    papers = [a_document(100 + number, tokens=200) for number in range(64)]
    questions = [paper.questions[number % len(paper.questions)] for number, paper in enumerate(papers)]
    asked = (
        ask(whole, prompt(paper.text, question.question)) for paper, question in zip(papers, questions, strict=True)
    )
    answers = await asyncio.gather(*asked)
    assert all(answer.finish_reason == "stop" for answer in answers)
    right = sum(question.needle in answer.text for question, answer in zip(questions, answers, strict=True))
    assert right >= 0.95 * len(papers)


async def test_several_choices_come_back_each_with_its_index(whole: Whole) -> None:
    client = client_of(whole)
    body = await client.completions.create(model=MODEL, prompt="The access code of the", n=3, max_tokens=8, seed=5)
    again = await client.completions.create(model=MODEL, prompt="The access code of the", n=3, max_tokens=8, seed=5)
    assert [choice.index for choice in body.choices] == [0, 1, 2]
    assert [choice.text for choice in body.choices] == [choice.text for choice in again.choices]


async def test_a_stop_string_ends_the_answer_and_is_not_returned(whole: Whole) -> None:
    paper = a_document(7)
    question = paper.questions[0]
    answer = await ask(whole, prompt(paper.text, question.question), stop=[" is "])
    assert answer.text == question.answer.split(" is ")[0]
    assert answer.finish_reason == "stop"
