"""`/v1/document_sets` over HTTP: uploads, progress, requests that name documents, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from policies.errors import InvalidRequest
from policies.sla.config import Config
from router.ask import AskDocument, Chat
from router.protocols.http.document_sets import computing_ask, upload_of
from router.shared.documents.document_set import DocumentSet
from router.start.app import Router
from tests.router.call.test_warming import TEXT, a_keeper
from tests.router.parts import CHAT, MODEL, Client, a_chat, a_client, a_config, a_tenant
from tests.shards.attached import eventually

PATH = "/v1/document_sets/animals"
FOX, DOG = {"id": "fox", "title": "Foxes", "text": f"Foxes. {TEXT}"}, {"id": "dog", "text": f"Dogs. {TEXT}"}
SYSTEM = {"role": "system", "content": "Answer from these."}


@asynccontextmanager
async def a_service(config: Config | None = None, *, pins: bool = True) -> AsyncIterator[tuple[Client, Router]]:
    made = a_keeper("b0", pins=pins), a_keeper("b1", pins=pins)
    limited = a_tenant("labs", key="labs-key", pinned_tokens=100, stored_documents=3, stored_bytes=50_000)
    async with Router(config or a_config(a_tenant(), limited), backends=lambda _: made) as router:
        assert await router.wait_until_reached(5)
        async with a_client(router) as client:
            yield client, router
        await eventually(lambda: not router.gateway.document_sets._busy)
        router.check()


async def a_call(client: Client, method: str, path: str, body: Any = None, *, key: str = "acme-key") -> tuple[int, Any]:
    data = None if body is None else json.dumps(body)
    headers = {"authorization": f"Bearer {key}"}
    async with client.session.request(method, client.url + path, data=data, headers=headers) as reply:
        return reply.status, await reply.json()


async def shown_as(client: Client, path: str = PATH, **progress: int) -> Any:
    """The set, once its documents have these states."""
    for _ in range(500):
        _, found = await a_call(client, "GET", path)
        if found["progress"] == progress:
            return found
    raise AssertionError(f"the documents stay {found['progress']}")


def a_set(**fields: Any) -> dict[str, Any]:
    return {"documents": [FOX, DOG], **fields}


async def test_documents_are_stored_listed_shown_and_dropped() -> None:
    async with a_service() as (client, _):
        status, kept = await a_call(client, "PUT", PATH, a_set(ttl="2h"))
        assert status == 200
        assert (kept["id"], kept["count"], kept["model"]) == ("animals", 2, None)
        assert kept["expires_at"] - kept["created"] == 7200
        assert kept["progress"] == {"stored": 2}
        fox, _ = kept["documents"]
        assert (fox["id"], fox["title"], fox["bytes"], fox["usage"]["requests"]) == (
            "fox",
            "Foxes",
            len(FOX["text"]),
            0,
        )
        status, listed = await a_call(client, "GET", "/v1/document_sets")
        assert [each["id"] for each in listed["data"]] == ["animals"]
        assert "documents" not in listed["data"][0]
        assert (await a_call(client, "DELETE", PATH))[1] == {"id": "animals", "object": "document_set", "deleted": True}
        for method, path in (("GET", PATH), ("DELETE", PATH), ("DELETE", f"{PATH}/documents/fox")):
            status, error = await a_call(client, method, path)
            assert (status, error["error"]["code"]) == (404, "document_not_found")


async def test_with_a_model_each_document_is_computed_and_pinned_behind_the_head() -> None:
    async with a_service() as (client, router):
        await a_call(client, "PUT", PATH, a_set(model=MODEL, messages=[SYSTEM], shards=2))
        found = await shown_as(client, ready=2)
        prefixes = {prefix.id: prefix for prefix in router.gateway.prefixes.of("acme")}
        assert {each["prefix"] for each in found["documents"]} == prefixes.keys()
        assert all(prefix.shards == 2 for prefix in prefixes.values())
        # a request that names the document finds it in the cache
        body = {"model": MODEL, "messages": [SYSTEM, a_chat("Which?")["messages"][0]], "document_set": "animals"}
        async with client.post(
            CHAT, {**body, "documents": [{"id": "dog"}]}, headers={"x-pointsman-explain": "1"}
        ) as reply:
            decision = json.loads(reply.headers["x-pointsman-decision"])
            assert json.loads(reply.headers["x-pointsman-document-order"]) == ["dog"]
        assert max(each["held_tokens"] for each in decision["candidates"]) >= 64 * (decision["prompt_tokens"] // 64 - 2)


async def test_documents_that_are_gone_or_replaced_lose_their_pins() -> None:
    async with a_service() as (client, router):
        await a_call(client, "PUT", PATH, a_set(model=MODEL))
        before = await shown_as(client, ready=2)
        status, _ = await a_call(client, "DELETE", f"{PATH}/documents/dog")
        assert status == 200
        await shown_as(client, ready=1)
        await eventually(lambda: len(router.gateway.prefixes.of("acme")) == 1)
        new = {**FOX, "text": f"New. {TEXT}"}
        await a_call(client, "PUT", PATH, a_set(model=MODEL, documents=[new]))
        await eventually(
            lambda: [one.id for one in router.gateway.prefixes.of("acme")] != [before["documents"][0]["prefix"]]
        )
        after = await shown_as(client, ready=1)
        assert after["version"] > before["version"]
        await a_call(client, "DELETE", PATH)
        await eventually(lambda: not router.gateway.prefixes.of("acme"))


async def test_documents_are_added_and_the_set_is_kept_longer() -> None:
    async with a_service() as (client, _):
        await a_call(client, "PUT", PATH, {"documents": [FOX], "ttl": 60})
        _, kept = await a_call(client, "POST", PATH, {"documents": [DOG, {**FOX, "title": "Fox"}], "ttl": 60})
        assert [(each["id"], each["title"]) for each in kept["documents"]] == [("fox", "Fox"), ("dog", "")]
        _, longer = await a_call(client, "PATCH", PATH, {"ttl": "1h"})
        assert longer["expires_at"] - longer["created"] >= 3599
        assert longer["version"] == kept["version"]
        _, same = await a_call(client, "PATCH", PATH, {"ttl": 5})
        assert same["expires_at"] == longer["expires_at"]


async def test_a_request_names_documents_of_a_set_and_its_use_is_counted() -> None:
    async with a_service() as (client, router):
        await a_call(client, "PUT", PATH, a_set())
        named = a_chat("Which?", document_set="animals", documents=[{"id": "dog"}, {"id": "new", "text": "A new one."}])
        status, _ = await client.answer(CHAT, named)
        assert status == 200
        backends = [router.gateway.cluster.backend(name) for name in ("b0", "b1")]
        ((_, prompt),) = [each for backend in backends for each in backend.received]  # type: ignore[attr-defined]
        assert prompt.body["messages"][0]["content"].startswith(
            f"Documents:\n\nDocument dog\n{DOG['text']}\n\nDocument new"
        )
        await client.answer(CHAT, a_chat("Which?", document_set="animals", document_order="any"))
        _, found = await a_call(client, "GET", PATH)
        assert {each["id"]: each["usage"]["requests"] for each in found["documents"]} == {"fox": 1, "dog": 2}
        assert found["unused"] == 0


async def test_a_tenant_names_its_own_sets_only() -> None:
    async with a_service() as (client, _):
        await a_call(client, "PUT", PATH, a_set())
        for method, path, body in (("GET", PATH, None), ("DELETE", PATH, None), ("PATCH", PATH, {})):
            assert (await a_call(client, method, path, body, key="labs-key"))[0] == 404
        status, error = await client.answer(CHAT, a_chat(document_set="animals"), key="labs-key")
        assert (status, error["error"]["code"]) == (404, "document_not_found")
        status, error = await client.answer(CHAT, a_chat(document_set="animals", documents=[{"id": "cat"}]))
        assert status == 404
        assert "has no document 'cat'" in error["error"]["message"]


async def test_more_than_the_tenant_may_store_is_refused_and_nothing_changes() -> None:
    async with a_service() as (client, _):
        three = [{"id": str(number), "text": "x"} for number in range(3)]
        assert (await a_call(client, "PUT", PATH, {"documents": three}, key="labs-key"))[0] == 200
        for body in ({"documents": [*three, FOX]}, {"documents": [{"text": "x" * 50_001}]}):
            status, error = await a_call(client, "PUT", PATH, body, key="labs-key")
            assert (status, error["error"]["code"]) == (429, "rate_limit_exceeded")
        status, error = await a_call(client, "PUT", "/v1/document_sets/more", {"documents": [FOX]}, key="labs-key")
        assert status == 429
        assert (await a_call(client, "GET", PATH, key="labs-key"))[1]["count"] == 3


async def test_a_document_that_cannot_be_computed_shows_the_reason() -> None:
    async with a_service() as (client, _):
        await a_call(client, "PUT", PATH, a_set(model=MODEL, documents=[FOX]), key="labs-key")
        for _ in range(500):
            _, found = await a_call(client, "GET", PATH, key="labs-key")
            if found["progress"] == {"failed": 1}:
                break
        assert "would keep" in found["documents"][0]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "documents", "missing required field"),
        ({"documents": [{"id": "fox"}]}, "documents[0].text", "has no text"),
        ({"documents": [{"text": "a\ud800"}]}, "documents[0].text", "not valid Unicode"),
        ({"documents": [FOX, {**FOX, "text": "else"}]}, "documents[1].id", "another document"),
        ({"documents": [FOX], "shards": 2}, "model", "need `model`"),
        ({"documents": [FOX], "model": MODEL, "shards": 65}, "shards", "<= 64"),
        (
            {"documents": [FOX], "model": MODEL, "messages": [{"role": "", "content": ""}]},
            "messages[0].role",
            "length >= 1",
        ),
        ({"documents": [FOX], "ttl": "8d"}, "ttl", "from 1s to 7d"),
        ({"documents": [FOX], "shard": 1}, "shard", "not a field"),
    ],
)
def test_a_bad_upload_is_refused_by_its_field(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        upload_of(body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ([], "Documents:\n\nDocument fox\nquick\n\n"),
        ([SYSTEM], "Answer from these.\n\nDocuments:\n\nDocument fox\nquick\n\n"),
        (
            [{"role": "user", "content": "Read {{documents}} and say"}, SYSTEM],
            "Read Documents:\n\nDocument fox\nquick\n\n",
        ),
    ],
)
def test_a_document_is_computed_as_the_first_behind_the_head_and_nothing_behind_it(head: Any, text: str) -> None:
    kept = DocumentSet("acme", "s", 1, 1, 0.0, 9.0, (), model=MODEL, head=json.dumps(head).encode())
    ask = computing_ask(kept, AskDocument("fox", "quick"))
    (chat,) = ask.inputs
    assert isinstance(chat, Chat)
    assert chat.messages[-1]["content"] == text
    assert (chat.continues, chat.opens_answer, chat.starts, ask.yields) == (True, False, "Document ", True)
