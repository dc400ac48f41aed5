"""Message batches with Anthropic's official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types.messages import MessageBatch

from router.start.app import Router
from tests.router.batches.parts import OTHER_KEY, a_batch_router, files_in
from tests.router.parts import KEY, MODEL, ScriptedBackend, a_client, an_answer


@asynccontextmanager
async def a_client_of(router: Router, key: str = KEY) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=router.http_url, api_key=key, max_retries=0) as client:
        yield client


def a_request(name: str, **params: Any) -> Any:
    usual = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
    return {"custom_id": name, "params": {**usual, **params}}


async def ended(client: anthropic.AsyncAnthropic, batch: MessageBatch) -> MessageBatch:
    async with asyncio.timeout(30):
        while batch.processing_status != "ended":
            await asyncio.sleep(0.02)
            batch = await client.messages.batches.retrieve(batch.id)
    return batch


async def test_a_batch_is_answered_request_by_request(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router, a_client_of(router) as client:
        requests = [a_request("a"), a_request("b"), a_request("wrong", max_tokens="many")]
        batch = await client.messages.batches.create(requests=requests)
        assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 3)
        assert (batch.expires_at - batch.created_at).total_seconds() == 86_400
        batch = await ended(client, batch)
        assert batch.request_counts.to_dict() == {
            "processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0,
        }  # fmt: skip
        assert batch.ended_at is not None
        found = {each.custom_id: each.result async for each in await client.messages.batches.results(batch.id)}
        assert {name: result.type for name, result in found.items()} == {
            "a": "succeeded", "b": "succeeded", "wrong": "errored",
        }  # fmt: skip
        assert found["a"].message.content[0].text == "ok"  # type: ignore[union-attr]
        assert found["wrong"].error.error.type == "invalid_request_error"  # type: ignore[union-attr]
        assert [each.id async for each in client.messages.batches.list()] == [batch.id]
        assert (await client.messages.batches.delete(batch.id)).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError, match="there is no batch"):
            await client.messages.batches.retrieve(batch.id)


async def test_a_batch_that_is_cancelled_has_a_result_for_each_request(tmp_path: Path) -> None:
    backend = ScriptedBackend(scripts=[an_answer("first"), [asyncio.Event()], [asyncio.Event()]])
    async with a_batch_router(tmp_path, backend) as router, a_client_of(router) as client:
        batch = await client.messages.batches.create(requests=[a_request(name) for name in "abc"])
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            await client.messages.batches.delete(batch.id)
        with pytest.raises(anthropic.AnthropicError, match="results_url"):
            await client.messages.batches.results(batch.id)
        async with asyncio.timeout(10):
            while batch.to_dict()["progress"]["succeeded"] < 1:  # type: ignore[index]
                await asyncio.sleep(0.02)
                batch = await client.messages.batches.retrieve(batch.id)
        batch = await client.messages.batches.cancel(batch.id)
        assert batch.processing_status == "canceling"
        assert batch.cancel_initiated_at is not None
        batch = await ended(client, batch)
        assert (batch.request_counts.succeeded, batch.request_counts.canceled) == (1, 2)
        results = [each.result.type async for each in await client.messages.batches.results(batch.id)]
        assert sorted(results) == ["canceled", "canceled", "succeeded"]


async def test_lists_go_in_both_directions(tmp_path: Path) -> None:
    async with a_batch_router(tmp_path) as router, a_client_of(router) as client:
        made = [await client.messages.batches.create(requests=[a_request("a")]) for _ in range(3)]
        newest_first = [batch.id for batch in reversed(made)]
        assert [each.id async for each in client.messages.batches.list(limit=2)] == newest_first
        page = await client.messages.batches.list(limit=2, before_id=made[0].id)
        assert [each.id for each in page.data] == newest_first[:2]
        for batch in made:
            await ended(client, batch)


async def test_a_tenant_sees_its_own_alone(tmp_path: Path) -> None:
    async with (
        a_batch_router(tmp_path) as router,
        a_client_of(router) as client,
        a_client_of(router, OTHER_KEY) as other,
    ):
        batch = await ended(client, await client.messages.batches.create(requests=[a_request("a")]))
        for call in (other.messages.batches.retrieve, other.messages.batches.cancel, other.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError, match="there is no batch"):
                await call(batch.id)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"requests": []}, 400, "the batch has no requests"),
        ({"requests": [{"custom_id": "a"}]}, 400, "requests.0: `params` is missing"),
        ({"requests": [a_request("a b")]}, 400, "requests.0.custom_id is no id"),
        ({"requests": [a_request("a"), a_request("a")]}, 400, "requests.1.custom_id is there twice: 'a'"),
        ({"request": []}, 400, "`requests` is missing"),
        ({"requests": [a_request(str(number)) for number in range(4)]}, 413, "more than 3 requests"),
        ({"requests": [a_request("a", system="x" * 5000)]}, 413, "larger than 3,000 bytes"),
    ],
)
async def test_a_wrong_body_is_refused_in_anthropics_shape(
    tmp_path: Path, body: object, status: int, message: str
) -> None:
    async with (
        a_batch_router(tmp_path, max_lines=3, max_file_bytes=3000) as router,
        a_client(router) as client,
        client.post("/v1/messages/batches", data=json.dumps(body)) as reply,
    ):
        answer = await reply.json()
        assert (reply.status, answer["type"], message in answer["error"]["message"]) == (status, "error", True), answer
        assert router.operations.batches is not None
        assert not files_in(router.operations.batches.shelf.store.scratch())
