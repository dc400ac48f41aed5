"""A real engine's direct answers equal those through a router, field by field.

What differs all the same is in DIFFERENCES, each with its reason, and so in docs/clients.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shards.bundled import NAME
from tests.engines.compared import Difference, ask, differences, header_differences
from tests.engines.routed import a_router, pool_of

if TYPE_CHECKING:
    from tests.engines.conftest import Engines

PAGE = Path(__file__).parents[2] / "docs/clients.md"

DIFFERENCES = (
    Difference("*", "id", "each answer has an id of its own"),
    Difference("*", "created", "the time"),
    Difference("*", "error.*", "errors are the router's, in the client's dialect, with a hint"),
    Difference("/v1/chat/completions", "system_fingerprint", "of several choices, only the last one's end has it"),
    Difference("/v1/completions", "system_fingerprint", "of several choices, only the last one's end has it"),
    Difference("/v1/chat/completions", "choices[].delta.tool_calls[].id", "each call has an id of its own"),
    Difference("/v1/responses", "response.id", "each answer has an id of its own"),
    Difference("/v1/responses", "response.created_at", "the time"),
    Difference("/v1/responses", "response.output[].id", "each item has an id of its own"),
    Difference("/v1/responses", "created_at", "the time"),
    Difference("/v1/responses", "output[].id", "each item has an id of its own"),
    Difference("/v1/responses", "item.id", "each item has an id of its own"),
    Difference("/v1/responses", "item_id", "each item has an id of its own"),
    Difference("/v1/messages", "message.id", "each answer has an id of its own"),
    Difference("/v1/messages", "type", "an error begins as Anthropic's do"),
    Difference("/v1/messages/count_tokens", "context_management.*", "the router counts by itself"),
    Difference("/v1/models", "data[].*", "the router lists the models of all pools, with what it knows of them"),
)
"""Every difference that is meant, by endpoint and field."""

LLAMA_CPP = (
    *DIFFERENCES,
    Difference("*", "timings.*", "what this answer took"),
    Difference("/v1/completions", "usage", "not shown in a stream that does not ask for it; llama.cpp shows it always"),
)
"""The same for llama.cpp's server, as far as it knows what was asked: what it passes over, the router refuses."""

NOT_OF_LLAMA_CPP = (
    "choices",
    "echo",
    "least",
    "wrong",
    "prompts",
    "no such model",
    "no tokens",
    "too long",
    "of the prompt",
)
"""Words of the names of cases that it passes over in part."""

HEADERS = {
    "x-request-id": "the router's id of the call; or the client's own id of up to 128 printable characters, then "
    "`x-pointsman-request` has the router's",
    "request-id": "the same, for Anthropic's clients",
    "x-pointsman-backend": "which backend answered",
    "x-pointsman-class": "the service class of the call",
    "x-pointsman-tenant": "the tenant of the call",
    "cache-control": "no proxy may keep a stream",
    "x-accel-buffering": "no proxy may hold a stream back",
    "keep-alive": "each server's own",
    "access-control-allow-origin": "the router's own rules for web pages",
    "content-type": "a stream's type without its charset, which is UTF-8 in any case",
}
"""Every header that is meant to differ."""

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello, what is your name?"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "chat, every penalty": (
        CHAT,
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "seed": 7},
    ),
    "chat, two choices": (CHAT, {"n": 2, "temperature": 0.8, "seed": 1}),
    "chat, log-probabilities": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "chat, stop strings": (CHAT, {"stop": [" the", "model"]}),
    "chat, log-probabilities of the prompt": (CHAT, {"prompt_logprobs": 1}),
    "chat, least tokens": (CHAT, {"min_tokens": 8, "max_tokens": 9}),
    "chat, tools": (CHAT, {"tools": [TOOL], "tool_choice": "none"}),
    "chat, a tool by name": (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}, "max_tokens": 24},
    ),
    "chat, a schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 12},
    ),
    "chat, token ids": (CHAT, {"return_token_ids": True}),
    "chat, no such field": (CHAT, {"no_such_field": {"a": [1.50]}}),
    "chat, a field that is wrong": (CHAT, {"top_logprobs": 5}),
    "chat, a value that is wrong": (CHAT, {"top_p": 7}),
    "chat, too long": (CHAT, {"messages": [{"role": "user", "content": "word " * 4000}]}),
    "chat, no such model": (CHAT, {"model": "nobody"}),
    "text": (TEXT, {}),
    "text, echo": (TEXT, {"echo": True}),
    "text, echo with log-probabilities": (TEXT, {"echo": True, "logprobs": 1}),
    "text, nothing but an echo": (TEXT, {"echo": True, "max_tokens": 0}),
    "text, two choices": (TEXT, {"n": 2, "temperature": 0.8, "seed": 1}),
    "text, several prompts": (TEXT, {"prompt": ["Hello, what", "The name of the"], "stop": [" the"]}),
    "text, several prompts echoed": (
        TEXT,
        {"prompt": ["Hello, what", "The name of the"], "n": 2, "temperature": 0.8, "seed": 1, "echo": True},
    ),
    "text, token ids": (TEXT, {"prompt": [11, 12, 13]}),
    "text, log-probabilities": (TEXT, {"logprobs": 2}),
    "text, no tokens": (TEXT, {"max_tokens": 0}),
    "response": (RESPONSES, {}),
    "response, instructions and penalties": (
        RESPONSES,
        {
            "instructions": "Be brief.",
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "top_k": 5,
            "metadata": {"a": "b"},
        },
    ),
    "response, a conversation": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "And?"},
            ]
        },
    ),
    "response, tools": (
        RESPONSES,
        {"tools": [{"type": "function", "name": "look", "parameters": SCHEMA}], "tool_choice": "none"},
    ),
    "response, a schema": (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, "max_output_tokens": 12},
    ),
    "message": (MESSAGES, {}),
    "message, a system text and stops": (MESSAGES, {"system": "Be brief.", "stop_sequences": [" the"], "top_k": 5}),
    "message, tools": (
        MESSAGES,
        {"tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "none"}},
    ),
    "message, a value that is wrong": (MESSAGES, {"max_tokens": -1}),
}

BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 6},
    TEXT: {"prompt": "Hello, what", "max_tokens": 6},
    RESPONSES: {"input": "Hello, what is your name?", "max_output_tokens": 6},
    MESSAGES: {"messages": HELLO, "max_tokens": 6},
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"stream": True},
    "streamed with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "streamed with usage so far": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}


async def compared(
    engine: str, pool: Mapping[str, Any], way: str, allowed: Sequence[Difference], skips: Sequence[str] = ()
) -> tuple[dict[str, list[str]], set[str]]:
    """Case -> how the router's answer differs from the `engine`'s; and the names of all headers that differ."""
    found, headers = dict[str, list[str]](), set[str]()
    async with a_router(pool) as (client, router):
        for name, (path, more) in CASES.items():
            if "stream_options" in WAYS[way] and path in (RESPONSES, MESSAGES):
                continue
            if any(word in name for word in skips):
                continue
            body = {"model": NAME, "temperature": 0, **BASE[path], **more, **WAYS[way]}
            for url in (engine, client.url):
                # the prompt is cached from here on, in both cache domains
                await ask(client.http, url, path, body)
            direct, routed = [await ask(client.http, url, path, body) for url in (engine, client.url)]
            if lines := differences(path, direct, routed, allowed):
                found[name] = lines
            headers |= header_differences(direct, routed).keys()
        router.check()
    return found, headers


@pytest.mark.parametrize("way", WAYS)
async def test_answers_of_vllm_through_a_router_are_its_own(engines: Engines, way: str) -> None:
    (vllm,) = engines.vllm("a")
    found, headers = await compared(vllm.url, pool_of(vllm), way, DIFFERENCES)
    assert found == {}
    assert headers <= HEADERS.keys()


@pytest.mark.parametrize("way", WAYS)
async def test_answers_of_llama_cpp_through_a_router_are_its_own(engines: Engines, way: str) -> None:
    llama = engines.llama_server()
    pool = {"kind": "llama_cpp", "at": [llama.url], "model": NAME}
    found, headers = await compared(llama.url, pool, way, LLAMA_CPP, NOT_OF_LLAMA_CPP)
    assert found == {}
    assert headers <= HEADERS.keys()


async def test_the_tokens_of_a_message_are_counted_as_the_engine_counts_them(engines: Engines) -> None:
    (vllm,) = engines.vllm("a")
    path, body = "/v1/messages/count_tokens", {"model": NAME, "messages": HELLO, "system": "Be brief."}
    async with a_router(pool_of(vllm)) as (client, _):
        direct, routed = [await ask(client.http, url, path, body) for url in (vllm.url, client.url)]
    assert differences(path, direct, routed, DIFFERENCES) == []
    assert routed.body["input_tokens"] > 0


async def test_a_model_is_listed_in_the_engines_shape(engines: Engines) -> None:
    (vllm,) = engines.vllm("a")
    async with a_router(pool_of(vllm)) as (client, _):
        direct, routed = [await ask(client.http, url, "/v1/models", None) for url in (vllm.url, client.url)]
    assert differences("/v1/models", direct, routed, DIFFERENCES) == []
    assert [model["id"] for model in routed.body["data"]] == [model["id"] for model in direct.body["data"]] == [NAME]


def test_the_page_for_clients_has_every_difference_and_no_other() -> None:
    rows = re.findall(r"^\| (\S+) \| `([^`]+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    documented = {(where.strip("`"), field, reason) for where, field, reason in rows}
    meant = {(each.where.replace("*", "every"), each.field, each.reason) for each in DIFFERENCES}
    meant |= {("llama.cpp", each.field, each.reason) for each in LLAMA_CPP[len(DIFFERENCES) :]}
    meant |= {("headers", name, reason) for name, reason in HEADERS.items()}
    assert documented == meant
