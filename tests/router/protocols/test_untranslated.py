"""Bodies that no field of ours describes, or that cannot be translated: passed on where a backend speaks the dialect,
refused by name where none does.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InvalidRequest
from policies.nouns import DIALECTS as SPOKEN
from policies.sla.parse import parse
from router.protocols.dialects import DIALECTS
from router.protocols.untranslated import urls_in
from router.start.app import Router
from tests.standins.ollama import OllamaServer
from tests.standins.standin import running

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
METADATA = "http://169.254.169.254/latest/meta-data/"
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
_MESSAGE = {"role": "assistant", "content": "ok"}
ANSWERS: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}], "usage": USAGE},
    TEXT: {"choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}], "usage": USAGE},
    RESPONSES: {"id": "resp_1", "status": "completed", "output": [], "usage": {"input_tokens": 3, "output_tokens": 1}},
    MESSAGES: {
        "type": "message",
        "content": [],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 3, "output_tokens": 1},
    },
}

BODIES: list[tuple[str, dict[str, Any]]] = [
    # tools that the provider runs
    (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}], "tool_choice": "required"}),
    (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
    (RESPONSES, {"input": "hi", "tools": [{"type": "mcp", "server_label": "s"}], "tool_choice": {"type": "mcp"}}),
    (
        MESSAGES,
        {"messages": HELLO, "max_tokens": 5, "tool_choice": {"type": "any"}, "tools": [{"type": "web_search_1"}]},
    ),
    (CHAT, {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "patch"}}]}),
    # what the provider keeps
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    (RESPONSES, {"input": [{"type": "compaction", "encrypted_content": "x"}]}),
    (RESPONSES, {"input": "and then?", "previous_response_id": "resp_0"}),
    (RESPONSES, {"input": "and then?", "conversation": {"id": "conv_1"}}),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}),
    (RESPONSES, {"input": "hi", "background": True}),
    # shapes that only some servers know
    (RESPONSES, {"input": [{"role": "tool", "content": "12"}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA=="}}]}]}),
    (RESPONSES, {"input": "hi", "temperature": 3}),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "grammar", "syntax": "lark"}}}),
    (MESSAGES, {"messages": [{"role": "tool", "content": "12"}], "max_tokens": 5}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "hologram"}]}], "max_tokens": 5}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 5, "temperature": 1.5}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "hologram", "data": "x"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": {"text": "hello"}}]}),
    (CHAT, {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "absent"}}}),
    (CHAT, {"messages": HELLO, "logit_bias": {"word": 3}}),
    (CHAT, {"messages": HELLO, "temperature": 5}),
    (CHAT, {"messages": HELLO, "stop": [1, 2]}),
    (CHAT, {"messages": HELLO, "response_format": "json"}),
    (TEXT, {"prompt_embeds": "AAAA"}),
    (TEXT, {"prompt": [{"text": "hi"}]}),
    (TEXT, {"prompt": "hi", "best_of": 3}),
    (TEXT, {"prompt": "hi", "logprobs": 40}),
]
NAMES = [f"{path} {json.dumps(body)[:70]}" for path, body in BODIES]


@dataclass
class Server:
    """Speaks the dialects `speaks`, takes any body, and keeps what came."""

    speaks: tuple[str, ...]
    received: list[tuple[str, Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.received.append((request.path, json.loads(await request.read())))
        return web.json_response({"model": "m", **ANSWERS[request.path]})

    async def document(self, _: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {"post": {}} for path in self.speaks}})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}, {"id": "other"}]})


@asynccontextmanager
async def a_server(*speaks: str) -> AsyncIterator[tuple[Server, str]]:
    server, app = Server(speaks), web.Application()
    app.router.add_get("/openapi.json", server.document)
    app.router.add_get("/v1/models", server.models)
    for path in speaks:
        app.router.add_post(path, server.answer)
    there = TestServer(app)
    await there.start_server()
    try:
        yield server, str(there.make_url(""))
    finally:
        await there.close()


@asynccontextmanager
async def a_router(pools: Mapping[str, Any]) -> AsyncIterator[str]:
    sla = {
        "classes": {"chat": {}},
        "pools": pools,
        "rules": [{"class": "chat"}],
        "server": {"http": "127.0.0.1:0", "grpc": "off"},
    }
    async with Router(parse(json.dumps(sla))) as router:
        assert await router.wait_until_reached(10)
        yield router.http_url
        router.check()


def a_pool(url: str, kind: str = "openai_compatible") -> dict[str, Any]:
    return {"kind": kind, "model": "m", "at": [url]}


async def posted(url: str, path: str, body: object) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{url}{path}", json=body) as answer:
        return answer.status, await answer.json()


async def test_a_backend_that_speaks_the_dialect_gets_each_body_as_it_came() -> None:
    async with a_server(*ANSWERS) as (server, url), a_router({"own": a_pool(url)}) as router:
        for path, body in BODIES:
            status, reply = await posted(router, path, {"model": "m", **body})
            assert status == 200, (path, body, reply)
            assert server.received.pop() == (path, {"model": "m", **body})


async def test_a_backend_of_another_dialect_gets_none_and_the_client_hears_why() -> None:
    async with running(OllamaServer()) as ollama, a_router({"own": a_pool(ollama.url, "ollama")}) as router:
        for path, body in BODIES:
            status, reply = await posted(router, path, {"model": "m", **body})
            assert status == 400, (path, body, reply)
            assert reply["error"]["type"] == "invalid_request_error", reply
            assert not [seen for seen in ollama.received if seen.path in ("/api/chat", "/api/generate")]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=NAMES)
def test_the_refusal_is_that_of_the_translation(path: str, body: dict[str, Any]) -> None:
    ask = DIALECTS[path].parse({"model": "m", **body}, {})
    (native,) = ask.natives
    assert ask.needs & SPOKEN
    assert isinstance(native.untranslated, InvalidRequest)
    assert native.body == {"model": "m", **body}


async def test_of_several_backends_the_one_that_speaks_the_dialect_gets_it() -> None:
    async with (
        running(OllamaServer()) as ollama,
        a_server(*ANSWERS) as (server, url),
        a_router({"a": a_pool(ollama.url, "ollama"), "b": a_pool(url)}) as router,
    ):
        for path, body in BODIES:
            assert (await posted(router, path, {"model": "m", **body}))[0] == 200, body
        assert len(server.received) == len(BODIES)


async def test_a_field_that_one_kind_cannot_be_told_goes_to_another_kind() -> None:
    body = {"model": "m", "messages": HELLO, "logit_bias": {"7": 3}}
    async with running(OllamaServer()) as ollama, a_server(CHAT) as (server, url):
        async with a_router({"a": a_pool(ollama.url, "ollama"), "b": a_pool(url)}) as router:
            assert [(await posted(router, CHAT, body))[0] for _ in range(12)] == [200] * 12
            assert len(server.received) == 12
        async with a_router({"a": a_pool(ollama.url, "ollama")}) as router:
            status, reply = await posted(router, CHAT, body)
            assert (status, reply["error"]["param"]) == (400, "logit_bias")


async def test_a_body_without_a_model_means_the_only_one() -> None:
    async with a_server(*ANSWERS) as (server, url), a_router({"own": a_pool(url)}) as router:
        for path, body in BODIES:
            assert (await posted(router, path, body))[0] == 200, body
            assert server.received.pop()[1] == {**body, "model": "m"}
    async with a_server(*ANSWERS) as (_, one), a_server(*ANSWERS) as (_, two):
        pools = {"one": a_pool(one), "two": {**a_pool(two), "model": "other"}}
        async with a_router(pools) as router:
            assert (await posted(router, CHAT, {"messages": HELLO}))[0] == 400


BROKEN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "max_tokens": -1, "temperature": 5}),
    (CHAT, {"messages": HELLO, "max_tokens": "many"}),
    (CHAT, {"messages": HELLO, "n": 1000}),
    (CHAT, {"messages": HELLO, "stream": "yes"}),
    (CHAT, {"messages": HELLO, "stream_options": 3, "stream": True}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "hello"}),
    (CHAT, {"messages": ["hello"]}),
    (CHAT, {"messages": HELLO, "document_order": 3}),
    (TEXT, {"echo": True}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 0}),
    (RESPONSES, {"input": []}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 0}),
]


@pytest.mark.parametrize(("path", "body"), BROKEN)
def test_what_routing_and_limits_need_is_refused_where_it_cannot_be_read(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        DIALECTS[path].parse({"model": "m", **body}, {})


URLS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "hologram"}, {"type": "image", "image": METADATA}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": {"image_url": {"url": METADATA}}}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"video_url": {"url": f"\n{METADATA}"}}]}]}),
    (RESPONSES, {"input": [{"type": "computer_call_output", "output": {"image_url": METADATA}}]}),
    (RESPONSES, {"input": [{"role": "tool", "content": [{"type": "input_file", "file_url": METADATA}]}]}),
    (
        MESSAGES,
        {"messages": [{"role": "x", "content": [{"type": "image", "source": {"url": METADATA}}]}], "max_tokens": 1},
    ),
]


async def test_urls_that_an_engine_must_not_fetch_are_refused_here_too() -> None:
    async with a_server(*ANSWERS) as (server, url), a_router({"own": a_pool(url)}) as router:
        for path, body in URLS:
            status, reply = await posted(router, path, {"model": "m", **body})
            assert status == 400, body
            assert "the URL '" in reply["error"]["message"]
        assert not server.received


def test_urls_that_nobody_fetches_are_no_media() -> None:
    found = {"type": "web_search_result", "url": METADATA}
    said = {"role": "assistant", "content": [{"type": "tool_use", "input": {"url": METADATA}}, found]}
    assert not [*urls_in([said, {"content": [{"type": "text", "text": METADATA, "annotations": [{"url": METADATA}]}]}])]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "url", "role"]), inner)
    ),
    max_leaves=8,
)


@given(
    st.sampled_from([*ANSWERS]),
    st.dictionaries(
        st.sampled_from(
            ["temperature", "tools", "tool_choice", "input", "messages", "prompt", "system", "stop", "metadata", "user"]
        ),
        _JSON,
    ),
)
def test_any_body_is_read_translated_or_refused(path: str, body: dict[str, Any]) -> None:
    try:
        ask = DIALECTS[path].parse({"model": "m", "max_tokens": 5, **body}, {})
    except InvalidRequest:
        return
    assert ask.model == "m"
    assert len(ask.inputs) == len(ask.bodies) == len(ask.natives)
