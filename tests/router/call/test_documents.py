"""A call with documents: what its backend gets, and what its client learns of their order."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import CacheListener, Tokenized
from policies.errors import InvalidRequest, RequestTooLarge
from policies.nouns import USUAL_REUSE_BUDGET, Limits, Prompt, Request, Usage
from policies.rules import Rule
from policies.sla.config import Config
from router.call.bodies import Bodies, Held
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.protocols.openai.request import chat_ask
from router.text.documents import HEADING, MARK
from router.text.token_ids import unpack
from tests.router.callers import Listener, well
from tests.router.parts import (
    CHAT,
    KEY,
    MODEL,
    ScriptedBackend,
    a_chat,
    a_client,
    a_config,
    a_router,
    a_tenant,
    a_tokenizer,
    an_answer,
    built,
)
from tests.shards.attached import eventually

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
    gateway, tenant = await a_fleet(ScriptedBackend()), a_tenant()
    model = gateway.models.find(MODEL, tenant, gateway.config)
    with Held(Bodies(2**20), "acme") as held:
        ask = chat_ask(a_chat(MARK, documents=[{"text": "x" * 2**20}]))
        with pytest.raises(RequestTooLarge, match="documents"):
            await gateway.documents.written(ask, model, tenant, gateway.config, held)


# -- an order that the client left open


def some_documents(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Documents of 150 to 300 tokens, the same for the same seed."""
    rng, words = random.Random(seed), ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    texts = (" ".join(rng.choices(words, k=rng.randrange(60, 120))) for _ in range(count))
    return [{"id": f"d{number}", "text": text} for number, text in enumerate(texts)]


class Caching(ScriptedBackend):
    """Reports every block that it computed at once."""

    listener: CacheListener

    async def generate(self, request: Request, prompt: Prompt) -> Any:
        async for delta in super().generate(request, prompt):
            yield delta
        self.listener.store(self.name, request.block_keys)


class Reader(ScriptedBackend):
    """Takes messages and tells how many tokens they have."""

    async def tokenize(self, body: Mapping[str, Any], *, model: str) -> Tokenized | None:
        return Tokenized(array("I", range(300)), None)

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str | None:
        return None


class Learned(ScriptedBackend):
    """Takes messages and reports no cache events, but how much of a prompt was cached."""

    async def generate(self, request: Request, prompt: Prompt) -> Any:
        known = sum(key in request.block_keys for past in self.requests for key in past.block_keys)
        share = min(1.0, known / max(1, len(request.block_keys)))
        cached = int(share * request.prompt_tokens)
        self.scripts = [an_answer("ok", usage=Usage(request.prompt_tokens, 1, cached))]
        async for delta in super().generate(request, prompt):
            yield delta


async def a_fleet(*backends: ScriptedBackend, config: Config | None = None) -> Gateway:
    def make(listener: CacheListener) -> tuple[ScriptedBackend, ...]:
        for backend in backends:
            backend.listener = listener  # type: ignore[attr-defined]
        return backends

    gateway = built(config or a_config(), backends=make, rng=random.Random(1)).gateway
    return await well(gateway, *(backend.name for backend in backends))


async def asked(
    gateway: Gateway, documents: list[dict[str, Any]], *, session: str = "", key: str = KEY, order: str = "any"
) -> list[str]:
    """The ids of `documents` in the order of the prompt that they are sent with."""
    headers = {"x-pointsman-explain": "1", **({"x-pointsman-session": session} if session else {})}
    listener = Listener(chat_ask(a_chat("Which?", documents=documents, document_order=order), headers), key=key)
    listener.id = next(gateway.ids)
    await serve(listener, gateway)
    return [*listener.why[0].documents]


@pytest.mark.parametrize("kind", [Caching, Learned])
async def test_documents_are_ordered_as_a_backend_holds_them(kind: type[ScriptedBackend]) -> None:
    backends = [kind(f"b{number}", speaks_tokens=kind is Caching) for number in range(2)]
    gateway = await a_fleet(*backends)
    documents = some_documents(6)
    first = await asked(gateway, documents[:5], order="fixed")
    assert first == ["d0", "d1", "d2", "d3", "d4"]
    # the other order, without one, and with a new one
    again = [documents[place] for place in (5, 3, 1, 2, 0)]
    assert await asked(gateway, again) == ["d0", "d1", "d2", "d3", "d5"]
    assert await asked(gateway, again, order="fixed") == ["d5", "d3", "d1", "d2", "d0"]
    await gateway.tokenizers.close()
    gateway.check()


async def test_the_router_predicts_the_hit_of_the_order_that_it_chose() -> None:
    gateway = await a_fleet(Caching())
    documents = some_documents(5)
    await asked(gateway, documents)
    chat = a_chat("And now?", documents=documents[::-1], document_order="any")
    listener = Listener(chat_ask(chat, {"x-pointsman-explain": "1"}))
    await serve(listener, gateway)
    (candidate,) = listener.why[0].candidates
    held, size = candidate.held_tokens or 0, listener.why[0].prompt_tokens
    assert size > 500
    assert size - held < 2 * 64
    await gateway.tokenizers.close()


async def test_popular_documents_come_first_where_nothing_is_held() -> None:
    gateway = await a_fleet(ScriptedBackend(capabilities=frozenset()))
    documents = some_documents(5)
    for number in range(3):
        await asked(gateway, [documents[4], documents[number]])
    gateway.beliefs.forget("b0")
    assert await asked(gateway, documents[2:]) == ["d4", "d2", "d3"]
    await gateway.tokenizers.close()


async def test_the_first_documents_stay_in_front_where_the_client_says_so() -> None:
    gateway = await a_fleet(Caching())
    documents = some_documents(4)
    await asked(gateway, documents, order="fixed")
    await asked(gateway, [documents[3], *documents[:3]], order="fixed")
    assert await asked(gateway, documents[::-1], order="any after 1") == ["d3", "d0", "d1", "d2"]
    assert await asked(gateway, documents[::-1], order="any after 9") == ["d3", "d2", "d1", "d0"]
    await gateway.tokenizers.close()


async def test_an_order_that_is_being_computed_counts_as_held() -> None:
    computed = asyncio.Event()
    backends = [
        Caching(f"b{number}", scripts=[[computed, *an_answer("ok")], [computed, *an_answer("ok")]])
        for number in range(2)
    ]
    gateway = await a_fleet(*backends)
    documents = some_documents(10)
    first = asyncio.create_task(asked(gateway, documents))
    await eventually(lambda: len(gateway.cluster.computing) == 1)
    second = asyncio.create_task(asked(gateway, documents[::-1]))
    await eventually(lambda: sum(len(backend.requests) for backend in backends) == 2)
    computed.set()
    assert await first == await second == [f"d{number}" for number in range(10)]
    await gateway.tokenizers.close()
    gateway.check()


async def test_a_session_keeps_its_order_whatever_is_held() -> None:
    gateway = await a_fleet(Caching())
    documents = some_documents(4)
    await asked(gateway, [documents[2], documents[1]], session="s", order="any")
    await asked(gateway, documents[:2] * 2)
    assert await asked(gateway, [*documents], session="s") == ["d2", "d1", "d0", "d3"]
    assert await asked(gateway, [*documents][::-1], session="s") == ["d2", "d1", "d0", "d3"]
    await gateway.tokenizers.close()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.permutations(range(5)), min_size=1, max_size=4), st.permutations(range(5)))
async def test_no_tenant_sees_from_its_order_what_another_one_has_sent(others: list[list[int]], own: list[int]) -> None:
    documents, found = some_documents(5), []
    for sent in ([], others):
        config = a_config(a_tenant("acme"), a_tenant("labs", "labs-key"))
        gateway = await a_fleet(Caching("b0"), Learned("b1", speaks_tokens=False), config=config)
        for order in sent:
            await asked(gateway, [documents[place] for place in order], session="s", key="labs-key")
        found.append(await asked(gateway, [documents[place] for place in own], session="s"))
        await gateway.tokenizers.close()
    alone, beside = found
    assert alone == beside == [f"d{place}" for place in own]


async def test_tenants_that_share_their_cache_share_the_order() -> None:
    config = a_config(a_tenant("acme", domain="both"), a_tenant("labs", "labs-key", domain="both"))
    gateway = await a_fleet(Caching(), config=config)
    documents = some_documents(4)
    await asked(gateway, documents[::-1], key="labs-key")
    assert await asked(gateway, documents) == ["d3", "d2", "d1", "d0"]
    await gateway.tokenizers.close()


async def test_a_prompt_that_cannot_be_read_is_refused_as_without_an_order() -> None:
    gateway = await a_fleet(ScriptedBackend())
    ask = chat_ask(
        {
            **a_chat(documents=DOCUMENTS, document_order="any"),
            "messages": [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Which?"}],
        }
    )
    with pytest.raises(InvalidRequest, match="the user begins"):
        await serve(Listener(ask), gateway)


async def test_where_an_engine_counts_the_tokens_popular_documents_come_first() -> None:
    config = a_config(replace(a_tenant(), limits=Limits(tokens_per_minute=10**6)))
    gateway = await a_fleet(Reader(speaks_tokens=False), config=config)
    documents = some_documents(4)
    await asked(gateway, documents[::-1])
    # nothing can be looked up: its tokens of a document depend on the whole prompt
    assert await asked(gateway, documents) == ["d0", "d1", "d2", "d3"]
    await asked(gateway, [documents[3]])
    assert await asked(gateway, documents[1:]) == ["d3", "d1", "d2"]


# -- documents whose KV may be approximate


def with_reuse(*, tenant: float | None = None, rule: float | None = None) -> Config:
    config = a_config(a_tenant(reuse_budget=tenant))
    return replace(config, rules=(Rule("chat", reuse_budget=rule),))


@pytest.mark.parametrize(
    ("fields", "tenant", "rule", "budget"),
    [
        ({}, None, None, None),
        ({"reuse": "chunks"}, None, None, USUAL_REUSE_BUDGET),
        ({"reuse": "chunks", "reuse_budget": 0.3}, None, None, 0.3),
        ({"reuse": "chunks", "reuse_budget": 0}, 0.5, 0.6, 0.0),
        ({"reuse": "off"}, 0.5, 0.6, None),
        ({}, 0.5, None, 0.5),
        ({}, 0.5, 0.2, 0.2),
        ({}, 0.5, 1.0, None),
        ({}, 1.0, 0.2, 0.2),
    ],
)
async def test_the_client_decides_about_reuse_then_the_rule_then_the_tenant(
    fields: dict[str, Any], tenant: float | None, rule: float | None, budget: float | None
) -> None:
    backend = ScriptedBackend()
    async with a_router(backend, config=with_reuse(tenant=tenant, rule=rule)) as router, a_client(router) as client:
        status, _ = await client.answer(CHAT, a_question(**fields))
        assert status == 200
    reuse = backend.prompts[0].reuse
    assert (None if reuse is None else reuse.budget) == budget
    assert backend.prompts[0].body is not None
    assert not {"reuse", "reuse_budget"} & backend.prompts[0].body.keys()


@pytest.mark.parametrize("order", ["fixed", "any"])
async def test_the_places_of_documents_are_those_of_their_tokens(order: str) -> None:
    backend, documents = ScriptedBackend(), some_documents(4)
    async with a_router(backend) as router, a_client(router) as client:
        body = a_chat(f"Hello {MARK} and then?", documents=documents, document_order=order, reuse="chunks")
        status, _ = await client.answer(CHAT, body)
        assert status == 200
    reuse, ids = backend.prompts[0].reuse, unpack(backend.prompts[0].token_ids).tolist()
    assert reuse is not None
    texts = [a_tokenizer().decode(ids[start:stop]) for start, stop in reuse.spans]
    assert texts == [f"Document {document['id']}\n{document['text']}\n\n" for document in documents]


async def test_a_client_learns_how_many_tokens_were_blended() -> None:
    usage = Usage(700, 2, 64, blended_tokens=500)
    for path, place in (
        (CHAT, "prompt_tokens_details"),
        ("/v1/responses", "input_tokens_details"),
        ("/v1/messages", ""),
    ):
        backend = ScriptedBackend(scripts=[an_answer("a", "b", usage=usage)])
        async with a_router(backend) as router, a_client(router) as client:
            more = {"max_tokens": 5} if path == "/v1/messages" else {}
            body = {"model": MODEL, "input": "Which is quick?"} if path == "/v1/responses" else a_question(**more)
            status, answer = await client.answer(path, body)
            assert status == 200, answer
            found = answer["usage"][place] if place else answer["usage"]
            assert found["blended_tokens"] == 500
            assert found["cache_read_input_tokens" if not place else "cached_tokens"] == 64
