"""Embeddings: the way of a generation, answered with the backend's own reply."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import openai
import pytest
from hypothesis import given, settings

from backends.openai.pooled import EMBEDDINGS_PATH
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Capability, Delta, Usage
from router.protocols.pooled.embeddings import embeddings_ask
from tests.router.parts import CONTEXT_TOKENS, KEY, MODEL, ScriptedBackend, a_client, a_config, a_router, a_tenant
from tests.router.protocols.openai.test_request import anything

REPLY = (
    b'{"object":"list","model":"theirs","data":[{"object":"embedding","index":0,"embedding":[0.5,-1.25]},'
    b'{"object":"embedding","index":1,"embedding":[1e-3,2]}],"usage":{"prompt_tokens":4,"total_tokens":4},"extra":true}'
)


def a_body(given: Any = "the fox", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": given, **fields}


def an_embedder(name: str = "b0", *steps: Any) -> ScriptedBackend:
    script = list(steps) or [Delta(body=REPLY, usage=Usage(4))]
    return ScriptedBackend(name, speaks_tokens=False, scripts=[script])


def official(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


async def test_the_official_client_gets_vectors_and_the_backend_its_body() -> None:
    backend = an_embedder()
    async with a_router(backend) as router, official(router.http_url) as client:
        reply = await client.embeddings.create(
            model=MODEL, input=["the fox", "the dog"], encoding_format="float", dimensions=2, extra_body={"vendor": 1}
        )
        text = router.telemetry.exposition()[0].decode()
    assert [entry.embedding for entry in reply.data] == [[0.5, -1.25], [0.001, 2]]
    assert (reply.model, reply.usage.prompt_tokens) == (MODEL, 4)
    body = a_body(["the fox", "the dog"], encoding_format="float", dimensions=2, vendor=1)
    assert backend.prompts[0].body == body
    assert backend.prompts[0].path == EMBEDDINGS_PATH
    assert 'pointsman_requests_total{outcome="finished",service_class="chat",tenant="acme"} 1.0' in text


async def test_a_backend_that_fails_is_replaced() -> None:
    backends = [an_embedder(f"b{at}", BackendFailed("gone")) for at in range(2)]
    async with a_router(*backends, an_embedder("b2")) as router, a_client(router) as client:
        status, body = await client.answer(EMBEDDINGS_PATH, a_body())
    assert (status, body["model"], body["extra"]) == (200, MODEL, True)


async def test_a_batch_is_one_request_that_needs_embeddings() -> None:
    backend = an_embedder()
    async with a_router(backend) as router, a_client(router) as client:
        status, _ = await client.answer(EMBEDDINGS_PATH, a_body(["a" * 40] * 10))
    assert status == 200
    (request,) = backend.requests
    assert request.needs == {Capability.EMBEDDINGS}
    assert 60 < request.prompt_tokens < 120
    assert request.max_new_tokens == 1


async def test_texts_that_fit_one_by_one_may_together_be_longer_than_a_context() -> None:
    async with a_router(an_embedder()) as router, a_client(router) as client:
        status, _ = await client.answer(EMBEDDINGS_PATH, a_body(["a word " * 100] * 100))
    assert status == 200


async def test_a_backend_that_answers_without_embeddings_has_failed() -> None:
    async with a_router() as router, a_client(router) as client:
        status, body = await client.answer(EMBEDDINGS_PATH, a_body())
    assert (status, body["error"]["code"]) == (502, "backend_failed")


async def test_a_model_without_embeddings_is_refused_by_name() -> None:
    backend = ScriptedBackend(capabilities=frozenset(Capability) - {Capability.EMBEDDINGS})
    async with a_router(backend) as router, a_client(router) as client:
        status, body = await client.answer(EMBEDDINGS_PATH, a_body())
    assert (status, body["error"]["param"]) == (400, "model")
    assert "can make embeddings" in body["error"]["message"]


async def test_quota_and_keys_are_those_of_generations() -> None:
    config = a_config(a_tenant(concurrent=0))
    async with a_router(an_embedder(), config=config) as router, a_client(router) as client:
        assert (await client.answer(EMBEDDINGS_PATH, a_body()))[0] == 429
        assert (await client.answer(EMBEDDINGS_PATH, a_body(), key="nope"))[0] == 401


def test_token_ids_need_a_backend_that_takes_them() -> None:
    for given_ids in ([1, 2], [[1], [2]]):
        ask = embeddings_ask(a_body(given_ids), {})
        assert ask.inputs == (b"\1\0\0\0\2\0\0\0",)
        assert ask.needs == {Capability.EMBEDDINGS, Capability.TOKEN_IDS}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[1], ["a"]]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_name_with_a_hint(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        embeddings_ask({**a_body(), **fields}, {})
    assert failure.value.param == param
    assert failure.value.hint


async def test_a_text_beyond_the_context_is_refused_where_a_tokenizer_is_known() -> None:
    async with a_router() as router, a_client(router) as client:
        status, body = await client.answer(EMBEDDINGS_PATH, a_body("long " * CONTEXT_TOKENS))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


@settings(deadline=None)
@given(anything)
def test_any_input_is_an_ask_or_an_invalid_request(given_input: Any) -> None:
    with suppress(InvalidRequest):
        assert len(embeddings_ask(a_body(given_input), {}).inputs) == 1
