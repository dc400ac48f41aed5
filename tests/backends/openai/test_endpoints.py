from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from backends.http.backend import HttpBackend
from backends.openai.endpoints import endpoints_in
from backends.sglang import SGLang, SGLangOptions
from backends.vllm import VLLM, VLLMOptions
from policies.errors import BackendFailed
from policies.nouns import Native, Prompt
from tests.backends.parts import a_request

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def document(**fields: tuple[str, ...]) -> dict[str, Any]:
    """An OpenAPI document of endpoints below /v1 with these fields."""
    posts = {f"/v1/{name}": {"post": a_post(f"#/components/schemas/{name}")} for name in fields}
    schemas = {name: {"properties": {field: {} for field in known}} for name, known in fields.items()}
    return {"paths": {**posts, "/health": {"get": {}}}, "components": {"schemas": schemas}}


def a_post(schema: str) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": {"$ref": schema}}}}}


def test_an_openapi_document_lists_endpoints_and_their_fields() -> None:
    page = json.dumps(document(messages=("model", "cache_salt"), responses=("model",))).encode()
    assert endpoints_in(page) == {MESSAGES: {"model", "cache_salt"}, RESPONSES: {"model"}}


@pytest.mark.parametrize(
    "page", [b"", b"[]", b"{}", b'{"paths": {"/a": {"post": 5}}}', json.dumps({"paths": []}).encode()]
)
def test_other_documents_list_nothing(page: bytes) -> None:
    assert endpoints_in(page) == {}


def test_an_endpoint_without_a_described_body_has_no_fields() -> None:
    assert endpoints_in(b'{"paths": {"/a": {"post": {}}}}') == {"/a": frozenset()}


class Server:
    """A server with this OpenAPI document; None: it has none. `is_ill`: its health is 503."""

    def __init__(self, published: dict[str, Any] | None) -> None:
        self.published, self.is_ill, self.asked = published, False, 0

    async def openapi(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response(self.published, status=404 if self.published is None else 200)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_ill else 200)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    routes = {"/openapi.json": server.openapi, "/health": server.health, "/v1/models": server.models}
    app.add_routes([web.get(path, answer) for path, answer in routes.items()])
    async with TestServer(app) as there:
        yield str(there.make_url(""))


def sent_to(backend: HttpBackend, path: str) -> tuple[str, dict[str, Any]]:
    """The path that a client's body for `path` goes to, and the body there."""
    forged = {"cache_salt": "theirs", "kv_transfer_params": {"from": "afar"}, "extra_key": "theirs"}
    own = {"model": "m", "max_tokens": 5, "messages": [], "x": 1, **forged}
    prompt = Prompt(body={"model": "m", "messages": []}, native=Native(path, own))
    post = backend.exchange(a_request(domain="acme"), prompt).post
    return post.path, json.loads(post.content)


@pytest.mark.parametrize(
    ("published", "salted", "goes_to"),
    [
        pytest.param(document(messages=("model", "cache_salt")), True, MESSAGES, id="takes the salt"),
        pytest.param(document(messages=("model",)), True, "/v1/chat/completions", id="takes no salt"),
        pytest.param(document(messages=("model",)), False, MESSAGES, id="takes no salt and needs none"),
        pytest.param(document(responses=("cache_salt",)), True, "/v1/chat/completions", id="has no messages"),
        pytest.param(None, False, "/v1/chat/completions", id="tells nothing"),
    ],
)
async def test_messages_go_unchanged_to_a_vllm_that_accepts_the_routers_own_fields(
    published: dict[str, Any] | None, salted: bool, goes_to: str
) -> None:
    async with running(Server(published)) as url:
        backend = VLLM("b", url, pool="p", options=VLLMOptions(cache_salt=salted))
        await backend.probe()
        path, body = sent_to(backend, MESSAGES)
        await backend.close()
    assert path == goes_to
    assert body.get("cache_salt") == ("acme" if salted else None), "isolation wins"
    assert "kv_transfer_params" not in body
    assert ("x" in body) == (goes_to == MESSAGES)


async def test_a_vllm_with_ranks_gets_them_in_its_body_or_as_a_chat() -> None:
    async with running(Server(document(messages=("cache_salt",), responses=("cache_salt", "priority")))) as url:
        backend = VLLM("b", url, pool="p", options=VLLMOptions(priority=True))
        await backend.probe()
        assert sent_to(backend, RESPONSES)[0] == RESPONSES
        assert sent_to(backend, MESSAGES)[0] == "/v1/chat/completions"
        await backend.close()


async def test_an_sglang_is_sent_messages_without_its_id_for_aborts_but_never_without_the_salt() -> None:
    async with running(Server(document(messages=("model",)))) as url:
        for salted, goes_to in ((True, "/v1/chat/completions"), (False, MESSAGES)):
            backend = SGLang("b", url, pool="p", options=SGLangOptions(cache_salt=salted))
            await backend.probe()
            path, body = sent_to(backend, MESSAGES)
            await backend.close()
            assert path == goes_to
            assert body.get("extra_key") == ("acme" if salted else None)


async def test_it_is_asked_once_and_again_after_an_outage() -> None:
    server = Server(document(messages=("cache_salt",)))
    async with running(server) as url:
        backend = VLLM("b", url, pool="p")
        for _ in range(3):
            await backend.probe()
        assert server.asked == 1
        server.is_ill, server.published = True, document()
        with pytest.raises(BackendFailed):
            await backend.probe()
        server.is_ill = False
        await backend.probe()
        assert server.asked == 2
        assert sent_to(backend, MESSAGES)[0] == "/v1/chat/completions"
        await backend.close()
