"""Inputs from public bug reports of gateways, engines and clients, tried on a whole router: `tests/reports.md` names
each. An engine that knows only chats answers as in the report, and the client gets what its dialect asks for.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from policies.sla.parse import parse
from router.start.app import Router

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = {
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
    RESPONSES: {"input": "hi"},
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    MESSAGES: [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
    RESPONSES: [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
}


def call(index: int | None = 0, name: str | None = "f", arguments: str | None = "", **more: Any) -> dict[str, Any]:
    numbered = {} if index is None else {"index": index}
    function = {key: value for key, value in {"name": name, "arguments": arguments}.items() if value is not None}
    return {**numbered, "type": "function", "function": function, **more}


@asynccontextmanager
async def an_engine(deltas: Sequence[dict[str, Any]], **last: Any) -> AsyncIterator[tuple[str, list[Any]]]:
    """A router in front of an engine that streams `deltas`, and the bodies that the engine got."""
    received: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        received.append(json.loads(await request.read()))
        has_calls = any("tool_calls" in delta and delta["tool_calls"] for delta in deltas)
        finish = "tool_calls" if has_calls else "stop"
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for delta in deltas:
            await reply.write(_chunk(delta, None))
        await reply.write(_chunk({}, finish, **last))
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post(CHAT, answer)
    server = TestServer(app)
    await server.start_server()
    pool = {"kind": "openai_compatible", "model": "m", "at": [str(server.make_url(""))]}
    serves = {"http": "127.0.0.1:0", "grpc": "off"}
    sla = {"classes": {"chat": {}}, "pools": {"own": pool}, "rules": [{"class": "chat"}], "server": serves}
    try:
        async with Router(parse(json.dumps(sla))) as router:
            assert await router.wait_until_reached(10)
            yield router.http_url, received
    finally:
        await server.close()


def _chunk(delta: dict[str, Any], finish: str | None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}
    return f"data: {json.dumps(chunk)}\n\n".encode()


async def events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {"model": "m", "stream": True, **body}
    async with aiohttp.ClientSession() as http, http.post(f"{url}{path}", json=asked) as answer:
        raw = await answer.text()
        assert answer.status == 200, raw
    lines = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def blocks_of(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The blocks of a message: type, and the text or the arguments."""
    blocks: dict[int, tuple[str, str]] = {}
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks[event["index"]] = (event["content_block"]["type"], "")
        elif event["type"] == "content_block_delta":
            kind, text = blocks[event["index"]]
            delta = event["delta"]
            piece = {"text_delta": "text", "input_json_delta": "partial_json", "thinking_delta": "thinking"}
            if delta["type"] in piece:
                blocks[event["index"]] = (kind, text + delta[piece[delta["type"]]])
    return [*blocks.values()]


def items_of(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a response; each event belongs to an item that was announced before, and is not done yet."""
    opened: dict[int, str] = {}
    done: set[int] = set()
    assert [event["sequence_number"] for event in found] == sorted({event["sequence_number"] for event in found})
    for event in found:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(opened)
            opened[event["output_index"]] = event["item"]["id"]
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == opened[event["output_index"]]
            done.add(event["output_index"])
        elif "output_index" in event:
            assert event["item_id"] == opened[event["output_index"]]
            assert event["output_index"] not in done
    assert done == set(opened)
    assert found[-1]["type"] == "response.completed"
    output: list[dict[str, Any]] = found[-1]["response"]["output"]
    assert [item["id"] for item in output] == [*opened.values()]
    return output


ANSWERS: list[tuple[str, list[dict[str, Any]], list[tuple[str, str]]]] = [
    ("text beside an empty list of calls", [{"content": "a", "tool_calls": []}, {"content": "b"}], [("text", "ab")]),
    ("arguments in pieces", [{"tool_calls": [call(id="c")]}, {"tool_calls": [call(0, None, "{}")]}], [("call", "{}")]),
    ("all arguments with the name", [{"tool_calls": [call(id="c", arguments='{"a":1}')]}], [("call", '{"a":1}')]),
    (
        "text and the name of a call in one chunk",
        [{"content": "first:", "tool_calls": [call(id="c")]}, {"tool_calls": [call(0, None, '{"a":1}')]}],
        [("text", "first:"), ("call", '{"a":1}')],
    ),
    ("a call without parameters has no arguments", [{"tool_calls": [call(id="c")]}], [("call", "{}")]),
    ("a call with arguments of null", [{"tool_calls": [call(id="c", arguments=None)]}], [("call", "{}")]),
    ("no index", [{"tool_calls": [call(None, id="c", arguments='{"a":1}')]}], [("call", '{"a":1}')]),
    (
        "reasoning, then text, then two calls",
        [
            {"reasoning_content": "hm"},
            {"content": "so"},
            {"tool_calls": [call(0, id="c", arguments='{"a":1}'), call(1, id="d", arguments='{"a":2}')]},
        ],
        [("thought", "hm"), ("text", "so"), ("call", '{"a":1}'), ("call", '{"a":2}')],
    ),
]
_IN_MESSAGES = {"thinking": "thought", "text": "text", "tool_use": "call"}


@pytest.mark.parametrize(("deltas", "said"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
async def test_answers_of_reports_are_whole_in_messages(
    deltas: list[dict[str, Any]], said: list[tuple[str, str]]
) -> None:
    async with an_engine(deltas) as (url, _):
        found = await events(url, MESSAGES, ASKED[MESSAGES] | {"tools": TOOLS[MESSAGES]})
    blocks = [(_IN_MESSAGES[kind], text) for kind, text in blocks_of(found)]
    assert [(kind, json.loads(text or "{}") if kind == "call" else text) for kind, text in blocks] == [
        (kind, json.loads(text) if kind == "call" else text) for kind, text in said
    ]
    assert found[-1]["type"] == "message_stop"


@pytest.mark.parametrize(("deltas", "said"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
async def test_answers_of_reports_are_whole_in_responses(
    deltas: list[dict[str, Any]], said: list[tuple[str, str]]
) -> None:
    async with an_engine(deltas) as (url, _):
        found = await events(url, RESPONSES, ASKED[RESPONSES] | {"tools": TOOLS[RESPONSES]})
    told = []
    for item in items_of(found):
        if item["type"] == "function_call":
            told.append(("call", item["arguments"]))
        else:
            told.append(("thought" if item["type"] == "reasoning" else "text", item["content"][0]["text"]))
    assert told == said


async def test_thinking_that_nobody_signed_ends_with_a_signature_so_that_clients_keep_it() -> None:
    made = call(id="c", arguments="{}")
    async with an_engine([{"reasoning_content": "hm"}, {"content": "so"}, {"tool_calls": [made]}]) as (url, received):
        found = await events(url, MESSAGES, ASKED[MESSAGES] | {"tools": TOOLS[MESSAGES]})
        thinking = [event for event in found if event.get("index") == 0]
        assert [event["type"] for event in thinking[-2:]] == ["content_block_delta", "content_block_stop"]
        signed = thinking[-2]["delta"]
        assert signed["type"] == "signature_delta"
        assert signed["signature"]
        assert sum(event["type"] == "message_delta" for event in found) == 1
        # as a client sends it back between calls of tools
        said = [{"type": "thinking", "thinking": "hm", "signature": signed["signature"]}]
        used = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
        told = [{"type": "tool_result", "tool_use_id": "c", "content": "12"}]
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said + used}]
        turns.append({"role": "user", "content": told})
        await events(url, MESSAGES, ASKED[MESSAGES] | {"messages": turns, "tools": TOOLS[MESSAGES]})
    assert received[1]["messages"][1]["reasoning_content"] == "hm"


async def test_usage_with_cached_tokens_that_comes_last_is_told_last() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    async with an_engine([{"content": "a"}], usage=usage) as (url, _):
        (last,) = [event for event in await events(url, MESSAGES, ASKED[MESSAGES]) if event["type"] == "message_delta"]
        assert (last["usage"]["input_tokens"], last["usage"]["cache_read_input_tokens"]) == (5, 4)


_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
HISTORIES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        "reasoning with a status of null",
        [{"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "status": None}, _CALL],
        [{"role": "assistant"}],
    ),
    (
        "a message of the assistant with an id of null",
        [{"type": "message", "role": "assistant", "id": None, "content": [{"type": "output_text", "text": "hello"}]}],
        [{"role": "assistant", "content": "hello"}],
    ),
    (
        "items of the provider between others",
        [{"type": "computer_call_output", "call_id": "x", "output": {}}, {"type": "mcp_call", "id": "y"}],
        [],
    ),
    (
        "a result of several parts",
        [_CALL, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "12"}]}],
        [{"role": "assistant"}, {"role": "tool", "content": "12", "tool_call_id": "c"}],
    ),
    (
        "a result with an image",
        [
            _CALL,
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}],
            },
        ],
        [{"role": "assistant"}, {"role": "tool", "tool_call_id": "c"}],
    ),
]


@pytest.mark.parametrize(("items", "sent"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES])
async def test_histories_of_reports_become_chats(items: list[dict[str, Any]], sent: list[dict[str, Any]]) -> None:
    async with an_engine([{"content": "a"}]) as (url, received):
        await events(url, RESPONSES, {"input": [*items, {"role": "user", "content": "and?"}]})
    (body,) = received
    *history, last = body["messages"]
    assert last == {"role": "user", "content": "and?"}
    assert [{name: message[name] for name in wanted} for message, wanted in zip(history, sent, strict=True)] == sent


async def test_a_message_with_fields_of_null_passes_as_it_came() -> None:
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "refusal": None, "function_call": None, "audio": None}
    messages = [{"role": "user", "content": "hi"}, {**said, "tool_calls": [made]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "12"})
    async with an_engine([{"content": "a"}]) as (url, received):
        async with aiohttp.ClientSession() as http:
            asked = {"model": "m", "stream": True, "messages": messages}
            async with http.post(f"{url}{CHAT}", json=asked) as answer:
                assert answer.status == 200
                await answer.read()
        assert received[0]["messages"] == messages


async def test_results_of_parallel_calls_are_one_message_each_before_the_users_text() -> None:
    uses = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in ("c", "d")]
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in ("c", "d")]
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": uses},
        {"role": "user", "content": [results[0], {"type": "text", "text": "go on"}, results[1]]},
    ]
    async with an_engine([{"content": "a"}]) as (url, received):
        await events(url, MESSAGES, {"messages": turns, "max_tokens": 5, "tools": TOOLS[MESSAGES]})
    roles = [(message["role"], message.get("tool_call_id")) for message in received[0]["messages"]]
    assert roles == [("user", None), ("assistant", None), ("tool", "c"), ("tool", "d"), ("user", None)]
