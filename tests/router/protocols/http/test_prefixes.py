"""`/v1/prefixes` over HTTP: valid bodies, refused ones, and replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from policies.errors import InvalidRequest
from policies.nouns import Capability
from router.ask import Chat
from router.protocols.http.prefixes import wish_of
from router.start.app import Router
from tests.router.call.test_warming import TEXT, a_keeper
from tests.router.parts import KEY, MODEL, Client, a_client, a_config, a_tenant

PATH = "/v1/prefixes"
DOCUMENT = [{"role": "system", "content": "Answer from this."}, {"role": "user", "content": TEXT}]


def a_wish(**fields: Any) -> Mapping[str, Any]:
    return {"model": MODEL, "messages": DOCUMENT, **fields}


@asynccontextmanager
async def a_service(*, pins: bool = True) -> AsyncIterator[tuple[Client, Router]]:
    made = a_keeper("b0", pins=pins), a_keeper("b1", pins=pins)
    config = a_config(a_tenant(), a_tenant("labs", key="labs-key", pinned_tokens=100))
    async with Router(config, backends=lambda _: made) as router:
        assert await router.wait_until_reached(5)
        async with a_client(router) as client:
            yield client, router
        router.check()


def test_a_conversation_is_kept_up_to_the_end_of_its_last_message() -> None:
    wish = wish_of(a_wish(shards=3, ttl="2h", pin=True, wait=False, max_tokens=500, stream=True, user="u"), {})
    (chat,) = wish.ask.inputs
    assert isinstance(chat, Chat)
    assert (chat.continues, chat.opens_answer) == (True, False)
    assert (wish.shards, wish.ttl_s, wish.waits) == (3, 7200.0, False)
    assert (wish.ask.max_new_tokens, wish.ask.stream, wish.ask.yields) == (1, False, True)
    assert Capability.PINS in wish.ask.needs
    (body,) = wish.ask.bodies
    assert body == {"model": MODEL, "messages": DOCUMENT, "max_tokens": 1, "stream": False, "user": "u"}


def test_documents_are_part_of_what_is_kept() -> None:
    wish = wish_of(a_wish(documents=[{"id": "fox", "text": "The fox is quick."}]), {})
    (body,) = wish.ask.bodies
    assert "documents" not in body
    assert body["messages"][0]["content"].endswith("Documents:\n\nDocument fox\nThe fox is quick.\n\n")


def test_a_text_or_token_ids_are_kept_as_they_are() -> None:
    assert wish_of({"model": MODEL, "prompt": "text", "ttl": 30}, {}).ask.inputs == ("text",)
    assert wish_of({"model": MODEL, "prompt": [1, 2]}, {}).ask.inputs == (b"\1\0\0\0\2\0\0\0",)
    assert wish_of({"model": MODEL, "prompt": "text"}, {}).ttl_s == 600.0
    assert (
        wish_of({"model": MODEL, "prompt": "text", "suffix": "x", "echo": True, "logprobs": 1}, {}).ask.needs == set()
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": "text"}, "messages", "either `messages` or `prompt`"),
        ({"messages": None}, "messages", "Expected `array`"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "the last message is empty"),
        ({"shards": 0}, "shards", "from 1 to 64"),
        ({"shards": 65}, "shards", "from 1 to 64"),
        ({"ttl": "soon"}, "ttl", "must be a duration"),
        ({"ttl": 0.5}, "ttl", "must be from 1s to 7d"),
        ({"ttl": "8d"}, "ttl", "must be from 1s to 7d"),
        ({"ttl": None}, "ttl", "how long to keep it"),
        ({"pin": "yes"}, "pin", "only at backends that can pin"),
        ({"model": ""}, "model", "lists the models"),
        ({"shard": 2}, "shard", r"`shard` is not a field of this API \(did you mean 'shards'\?\)"),
        ({"kept_by": "me"}, "kept_by", "not a field of this API .*lists the fields"),
        ({"echo": True}, "echo", "not a field of this API"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        wish_of(a_wish(**fields), {})
    assert refused.value.param == param


def test_fields_about_answers_are_allowed_and_fields_of_the_prompt_are_kept() -> None:
    wish = wish_of(a_wish(temperature=0.5, n=3, reasoning_effort="low", vendor=None), {})
    assert wish.ask.bodies[0]["reasoning_effort"] == "low"
    assert wish.ask.sampling.choices == 1


def test_neither_conversation_nor_text_is_nothing_to_keep() -> None:
    with pytest.raises(InvalidRequest, match="either"):
        wish_of({"model": MODEL}, {})
    with pytest.raises(InvalidRequest, match="one prompt"):
        wish_of({"model": MODEL, "prompt": ["a", "b"]}, {})


def test_no_key_is_remembered_with_what_is_kept() -> None:
    headers = {"authorization": "Bearer secret", "x-api-key": "secret", "x-team": "search"}
    assert wish_of(a_wish(), headers).ask.headers == {"x-team": "search"}


async def test_a_prefix_is_kept_listed_shown_and_deleted() -> None:
    async with a_service() as (client, _):
        status, body = await client.answer(PATH, a_wish(shards=2, ttl="10m"))
        assert (status, body["object"], body["state"], body["shards"]) == (200, "prefix", "ready", 2)
        assert body["expires_at"] - body["created"] in (599, 600, 601)
        tokens = body["tokens"]
        for place in body["backends"]:
            assert (place["pool"], place["held_tokens"], place["pinned_tokens"]) == ("own", tokens, tokens)
            assert place["pinned_until"] == body["expires_at"]
        async with client.get(PATH) as reply:
            assert await reply.json() == {"object": "list", "data": [body]}
        async with client.get(f"{PATH}/{body['id']}") as reply:
            assert await reply.json() == body
        async with client.session.delete(f"{client.url}{PATH}/{body['id']}", headers=auth()) as reply:
            assert await reply.json() == {"id": body["id"], "object": "prefix", "deleted": True}
        async with client.get(PATH) as reply:
            assert (await reply.json())["data"] == []


async def test_what_follows_the_document_is_a_prompt_that_begins_with_the_prefix() -> None:
    async with a_service() as (client, router):
        _, reply = await client.answer(PATH, a_wish(shards=2))
        question = [DOCUMENT[0], {"role": "user", "content": f"{TEXT.strip()}\n\nQuestion: who jumps?"}]
        status, _ = await client.answer("/v1/chat/completions", {"model": MODEL, "messages": question})
        assert status == 200
        backends = [router.gateway.cluster.backend(name) for name in ("b0", "b1")]
        asked = [request for backend in backends for request, _ in backend.received if request.rank == 0]  # type: ignore[attr-defined]
        (pinned,) = {keys for backend in backends for keys, _ in backend.pinned.values()}  # type: ignore[attr-defined]
        assert asked[0].block_keys[: len(pinned)] == pinned
        assert len(pinned) * 64 == reply["tokens"]


async def test_a_request_that_does_not_wait_is_answered_at_once() -> None:
    async with a_service() as (client, router):
        status, reply = await client.answer(PATH, a_wish(wait=False))
        assert (status, reply["state"]) == (202, "warming")
        assert await router.gateway.doors.emptied(5)


async def test_a_place_without_pins_is_marked_and_a_required_pin_finds_no_backend() -> None:
    async with a_service(pins=False) as (client, _):
        status, reply = await client.answer(PATH, a_wish())
        assert (status, reply["backends"][0]["pinned_tokens"], reply["backends"][0]["pinned_until"]) == (200, 0, None)
        assert "cannot pin" in reply["backends"][0]["message"]
        status, reply = await client.answer(PATH, a_wish(pin=True))
        assert (status, reply["error"]["param"]) == (400, "pin")
        assert "only pools of kind 'shard' can" in reply["error"]["message"]


async def test_more_than_the_tenant_may_keep_is_refused_with_its_limit() -> None:
    async with a_service() as (client, _):
        status, reply = await client.answer(PATH, a_wish(), key="labs-key")
        assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "more than 100, its limit" in reply["error"]["message"]


async def test_without_a_key_nothing_is_shown_and_another_tenants_prefix_does_not_exist() -> None:
    async with a_service() as (client, _):
        _, body = await client.answer(PATH, a_wish())
        for method, path in (("GET", PATH), ("GET", f"{PATH}/{body['id']}"), ("DELETE", f"{PATH}/{body['id']}")):
            async with client.session.request(method, client.url + path) as reply:
                assert reply.status == 401
        async with client.get(PATH, key="labs-key") as reply:
            assert (await reply.json())["data"] == []
        for method in ("GET", "DELETE"):
            url = f"{client.url}{PATH}/{body['id']}"
            async with client.session.request(method, url, headers=auth("labs-key")) as reply:
                answer = await reply.json()
                assert (reply.status, answer["error"]["code"]) == (404, "prefix_not_found")


def auth(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
