"""Reranking and scores: the way of embeddings, with the backend's own reply."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings

from backends.openai.pooled import RERANK_PATH, SCORE_PATH
from policies.errors import InvalidRequest
from policies.nouns import Capability, Delta, Usage
from router.protocols.pooled.rerank import rerank_ask, score_ask
from tests.router.parts import MODEL, ScriptedBackend, a_client, a_router
from tests.router.protocols.openai.test_request import anything

REPLY = b'{"id":"r","model":"theirs","results":[{"index":1,"relevance_score":0.75}],"usage":{"total_tokens":9},"x":1}'


def a_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "query": "which fox?", "documents": ["the fox", {"text": "the dog"}], **fields}


def a_reranker() -> ScriptedBackend:
    return ScriptedBackend(speaks_tokens=False, scripts=[[Delta(body=REPLY, usage=Usage(9))]])


@pytest.mark.parametrize(
    ("path", "body"),
    [(RERANK_PATH, a_body(top_n=1, vendor=2)), (SCORE_PATH, {"model": MODEL, "text_1": "a", "text_2": ["b", "c"]})],
)
async def test_the_backend_gets_the_body_and_the_client_its_reply(path: str, body: dict[str, Any]) -> None:
    backend = a_reranker()
    async with a_router(backend) as router, a_client(router) as client:
        status, reply = await client.answer(path, body)
    assert (status, reply) == (200, {**json.loads(REPLY), "model": MODEL})
    assert (backend.prompts[0].path, backend.prompts[0].body) == (path, body)
    assert backend.requests[0].needs == {Capability.RERANK}


async def test_documents_that_fit_one_by_one_may_together_be_longer_than_a_context() -> None:
    async with a_router(a_reranker()) as router, a_client(router) as client:
        assert (await client.answer(RERANK_PATH, a_body(documents=["a word " * 100] * 100)))[0] == 200


async def test_a_model_without_reranking_is_refused_by_name() -> None:
    backend = ScriptedBackend(capabilities=frozenset(Capability) - {Capability.RERANK})
    async with a_router(backend) as router, a_client(router) as client:
        status, body = await client.answer(RERANK_PATH, a_body())
    assert (status, body["error"]["param"]) == (400, "model")
    assert "can score documents" in body["error"]["message"]


def test_a_call_is_measured_by_all_of_its_texts() -> None:
    assert rerank_ask(a_body(), {}).inputs == ("which fox?\nthe fox\nthe dog",)
    assert score_ask({"model": "m", "queries": "a", "documents": {"content": [{"text": "b"}]}}, {}).inputs == ("a\nb",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"query": ""}, "query"), ({"documents": []}, "documents"), ({"documents": ["a"] * 2049}, "documents"),
     ({"documents": "a"}, "documents"), ({"top_n": -1}, "top_n"), ({"model": None}, "model")],
)  # fmt: skip
def test_what_cannot_be_reranked_is_refused_by_its_name_with_a_hint(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        rerank_ask(a_body(**fields), {})
    assert failure.value.param == param
    assert failure.value.hint


def test_a_call_without_texts_has_nothing_to_score() -> None:
    with pytest.raises(InvalidRequest, match="nothing to score"):
        score_ask({"model": "m", "text_1": "", "text_2": []}, {})


@settings(deadline=None)
@given(anything)
def test_any_body_is_an_ask_or_an_invalid_request(value: Any) -> None:
    for ask_of, body in ((rerank_ask, a_body(documents=value)), (score_ask, {"model": "m", "text_1": value})):
        with suppress(InvalidRequest):
            assert len(ask_of(body, {}).inputs) == 1
