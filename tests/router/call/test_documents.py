"""A call with documents: what its backend gets, and what its client learns of their order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies.errors import RequestTooLarge
from router.call.bodies import Bodies
from router.call.documents import with_documents
from router.protocols.openai.request import chat_ask
from router.text.documents import HEADING, MARK
from router.text.token_ids import unpack
from tests.router.parts import CHAT, ScriptedBackend, a_chat, a_client, a_router, a_tokenizer

DOCUMENTS = [
    {"id": "fox", "text": "The fox is quick.", "title": "Foxes"},
    {"id": "dög", "text": "The dog is lazy."},
]
TEXT = f"{HEADING}Document fox: Foxes\nThe fox is quick.\n\nDocument dög\nThe dog is lazy.\n\n"


def a_question(**fields: Any) -> dict[str, Any]:
    return a_chat("Which is quick?", documents=DOCUMENTS, **fields)


async def test_a_backend_of_tokens_gets_the_documents_in_the_prompt() -> None:
    backend = ScriptedBackend()
    async with a_router(backend) as router, a_client(router) as client:
        status, _ = await client.answer(CHAT, a_question())
        assert status == 200
    prompt = a_tokenizer().decode(unpack(backend.prompts[0].token_ids).tolist())
    assert prompt == f"<|user|>{TEXT}Which is quick?\n<|assistant|>"
    assert backend.requests[0].documents == ("fox", "dög")


async def test_a_backend_of_messages_gets_them_as_text() -> None:
    backend = ScriptedBackend(speaks_tokens=False)
    async with a_router(backend) as router, a_client(router) as client:
        status, _ = await client.answer(CHAT, a_question())
        assert status == 200
    native = backend.prompts[0].native
    assert native is not None
    assert native.raw == b""
    for body in (backend.prompts[0].body, native.body):
        assert body is not None
        assert body["messages"] == [{"role": "user", "content": f"{TEXT}Which is quick?"}]
        assert "documents" not in body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_header_has_their_order(stream: bool) -> None:
    async with a_router() as router, a_client(router) as client:
        async with client.post(CHAT, a_question(stream=stream), headers={"x-pointsman-explain": "1"}) as reply:
            assert json.loads(reply.headers["x-pointsman-document-order"]) == ["fox", "dög"]
            assert json.loads(reply.headers["x-pointsman-decision"])["documents"] == ["fox", "dög"]
            await reply.read()
        async with client.post(CHAT, a_chat(), headers={"x-pointsman-explain": "1"}) as reply:
            assert "x-pointsman-document-order" not in reply.headers
            assert "documents" not in json.loads(reply.headers["x-pointsman-decision"])


async def test_a_document_that_is_there_twice_is_written_once_if_the_order_is_free() -> None:
    twice = [*DOCUMENTS, DOCUMENTS[0]]
    for order, shown in (("fixed", ["fox", "dög", "fox"]), ("any", ["fox", "dög"])):
        body = a_chat(documents=twice, document_order=order)
        async with a_router() as router, a_client(router) as client, client.post(CHAT, body) as reply:
            assert json.loads(reply.headers["x-pointsman-document-order"]) == shown


async def test_bad_documents_are_an_error_of_the_clients_dialect() -> None:
    async with a_router() as router, a_client(router) as client:
        status, answer = await client.answer(CHAT, a_chat(documents=[{"text": 3}]))
        assert status == 400
        assert answer["error"]["param"] == "documents[0].text"
        body = {**a_chat(documents=[{"text": 3}]), "max_tokens": 5}
        status, answer = await client.answer("/v1/messages", body)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"


async def test_their_tokens_are_counted() -> None:
    async with a_router() as router, a_client(router) as client:
        _, found = await client.answer("/tokenize", a_question())
        prompt = f"<|user|>{TEXT}Which is quick?\n<|assistant|>"
        assert found["tokens"] == a_tokenizer().encode(prompt, add_special_tokens=False).ids


async def test_documents_that_take_more_memory_than_one_request_may_are_refused() -> None:
    bodies = Bodies(2**20)
    with bodies.held("acme") as held:
        ask = chat_ask(a_chat(MARK, documents=[{"text": "x" * 2**20}]))
        with pytest.raises(RequestTooLarge, match="documents"):
            await with_documents(ask, held)
