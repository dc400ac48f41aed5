from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.anthropic.backend import Anthropic, AnthropicOptions
from backends.anthropic.prompt import messages_body
from policies.errors import BackendFailed, BackendRefused, InvalidRequest, Overloaded
from policies.nouns import Delta, Native, Prompt, Sampling, Usage
from tests.backends.parts import a_request, everything, text_of
from tests.standins.anthropic import AnthropicServer
from tests.standins.standin import TEXT, running

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@asynccontextmanager
async def a_backend(
    server: AnthropicServer | None = None, **options: Any
) -> AsyncIterator[tuple[Anthropic, AnthropicServer]]:
    async with running(server or AnthropicServer()) as standin:
        backend = Anthropic("c", standin.url, pool="p", options=AnthropicOptions(**options))
        try:
            yield backend, standin
        finally:
            await backend.close()


def translated(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    whole = {"messages": [{"role": "user", "content": "Hello"}], **body}
    return messages_body(a_request(**fields), Prompt(body=whole), "m")


def test_a_conversation_with_tools_says_the_same_in_anthropics_words() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{"}}
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    marked = {"type": "text", "text": "Long.", "cache_control": {"type": "ephemeral"}}
    body = translated(
        {
            "messages": [
                {"role": "system", "content": [marked]},
                {"role": "developer", "content": "Brief."},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "A moment.", "thinking_blocks": [thought], "reasoning_content": "t"},
                {"role": "assistant", "content": None, "tool_calls": [call, broken]},
                {"role": "tool", "tool_call_id": "c1", "content": "one"},
                {"role": "tool", "tool_call_id": "c2", "content": ""},
                {"role": "user", "content": "Go on."},
            ],
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "stop": "END",
            "user": "u",
            "temperature": 0.5,
            "reasoning_effort": "low",
            "max_completion_tokens": 9,
        },
        sampling=Sampling(temperature=0.5, stop=("END",), top_k=4),
    )
    assert body == {
        "model": "m",
        "stream": True,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 4,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "low"},
        "system": [marked, {"type": "text", "text": "Brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {
                "role": "assistant",
                "content": [
                    thought,
                    {"type": "text", "text": "A moment."},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                    {"type": "tool_use", "id": "c2", "name": "f", "input": {"INVALID_JSON": "{"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "one"}]},
                    {"type": "tool_result", "tool_use_id": "c2", "content": []},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }


@pytest.mark.parametrize(
    ("name", "value"), [("web_search_options", {"a": 1}), ("functions", [{"name": "f"}]), ("mirostat", 2)]
)
def test_what_anthropic_does_not_know_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"does not know `{name}`") as failure:
        translated({name: value})
    assert failure.value.param == name


def test_what_is_idle_is_left_out_and_anthropics_own_words_go_through() -> None:
    idle = {"verbosity": "low", "prediction": {"type": "content"}, "store": True, "web_search_options": None}
    own = {"thinking": {"type": "adaptive"}, "container": "c", "mcp_servers": [{"name": "x"}]}
    assert translated({**idle, **own}) == {**translated({}), **own}


@pytest.mark.parametrize(
    ("tier", "expected"),
    [("auto", "auto"), ("default", "standard_only"), ("standard_only", "standard_only"), ("flex", None), (None, None)],
)
def test_tiers_of_service_have_anthropics_names(tier: str | None, expected: str | None) -> None:
    assert translated({"service_tier": tier}).get("service_tier") == expected


@pytest.mark.parametrize(
    ("effort", "expected"),
    [
        ("low", {"output_config": {"effort": "low"}}),
        ("minimal", {"output_config": {"effort": "low"}}),
        ("xhigh", {"output_config": {"effort": "xhigh"}}),
        ("none", {"thinking": {"type": "disabled"}}),
    ],
)
def test_efforts_have_anthropics_names(effort: str, expected: dict[str, Any]) -> None:
    assert translated({"reasoning_effort": effort}) == {**translated({}), **expected}


def test_a_tool_that_is_strict_is_so_at_anthropic() -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    assert translated({"tools": [strict]})["tools"][0]["strict"] is True


def test_a_choice_of_several_tools_is_refused() -> None:
    with pytest.raises(InvalidRequest) as failure:
        translated({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}})
    assert failure.value.param == "tool_choice"


def test_images_and_files_are_blocks() -> None:
    parts = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,BBBB"}},
    ]
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "BBBB"}
    assert translated({"messages": [{"role": "user", "content": parts}]})["messages"][0]["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
        {"type": "document", "source": pdf, "title": "a.pdf"},
    ]


def test_sound_is_refused_before_anthropic_does() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    with pytest.raises(InvalidRequest, match="input_audio"):
        translated({"messages": [{"role": "user", "content": [sound]}]})


def test_the_longest_answer_is_always_sent() -> None:
    assert translated({}, max_new_tokens=77)["max_tokens"] == 77


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", {"type": "auto"}),
        ("none", {"type": "none"}),
        ({"type": "function", "function": {"name": "f"}}, {"type": "tool", "name": "f"}),
    ],
)
def test_tool_choices_have_anthropics_names(choice: Any, expected: dict[str, Any]) -> None:
    assert translated({"tools": [TOOL], "tool_choice": choice})["tool_choice"] == expected


def test_a_json_schema_is_the_shape_of_the_output() -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    config = translated({"response_format": shape})["output_config"]
    assert config == {"format": {"type": "json_schema", "schema": {"type": "object"}}}


async def test_a_body_of_its_own_dialect_goes_through_whole() -> None:
    own = {"model": "m", "max_tokens": 5, "messages": [], "stream": True, "vendor": {"a": 1}}
    async with a_backend(models={"m": "theirs"}) as (backend, _):
        post = backend.exchange(a_request(), Prompt(body={}, native=Native("/v1/messages", own))).post
    assert (post.path, json.loads(post.content)) == ("/v1/messages", {**own, "model": "theirs"})


@pytest.mark.parametrize(
    ("body", "sampling", "param"),
    [
        ({}, Sampling(seed=1), "seed"),
        ({}, Sampling(choices=2), "n"),
        ({}, Sampling(temperature=1.5), "temperature"),
        ({"response_format": {"type": "json_object"}}, Sampling(), "response_format"),
    ],
)
def test_what_it_has_no_word_for_is_refused(body: dict[str, Any], sampling: Sampling, param: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        translated(body, sampling=sampling)
    assert failure.value.param == param


def test_a_text_to_continue_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="conversations"):
        messages_body(a_request(), Prompt(body={"prompt": "Hello"}, path="/v1/completions"), "m")


async def test_an_answer_has_thinking_text_calls_and_usage() -> None:
    server = AnthropicServer(thinks="Hm.", arguments='{"a": 1}', cached_tokens=2, cut_bytes=7)
    async with a_backend(server) as (backend, _):
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL]}
        deltas = await everything(backend, prompt=Prompt(body=body))
    assert text_of(deltas) == TEXT
    assert deltas[0] == Delta(message={"reasoning_content": "Hm."})
    signed = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    assert deltas[1] == Delta(message={"thinking_blocks": [signed]})
    calls = [call for delta in deltas for call in (delta.message or {}).get("tool_calls", ())]
    assert (calls[0]["id"], calls[0]["function"]["name"]) == ("toolu_1", "f")
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["tool_calls"]
    assert deltas[-1] == Delta(usage=Usage(5, len(TEXT), 2))


async def test_key_and_version_are_in_headers() -> None:
    async with a_backend(AnthropicServer(key="k"), key="k") as (backend, server):
        await everything(backend)
    headers = server.received[0].headers
    assert (headers["x-api-key"], headers["anthropic-version"]) == ("k", "2023-06-01")
    assert "authorization" not in headers


async def test_a_client_of_its_dialect_speaks_the_version_that_it_names() -> None:
    own = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x-1"}
    async with a_backend(version="2026-10-21") as (backend, server):
        await everything(backend, prompt=Prompt(body=own, native=Native("/v1/messages", own), headers=headers))
    assert server.received[0].headers.items() >= headers.items()


async def test_errors_mean_what_they_say() -> None:
    async with a_backend(AnthropicServer(key="k"), key="x") as (backend, server):
        with pytest.raises(BackendFailed, match="does not let the router in"):
            await everything(backend)
        server.key, server.is_busy = None, True
        with pytest.raises(Overloaded) as busy:
            await everything(backend)
        assert busy.value.retry_after_s == 3
        server.is_busy = False
        with pytest.raises(BackendRefused, match="model: x"):
            await everything(backend, a_request(model="x"))


async def test_models_are_learnt_and_not_asked_for_at_every_probe() -> None:
    async with a_backend() as (backend, server):
        await backend.probe()
        described = backend.describe()
        assert described is not None
        assert described.models == {"m"}
        server.is_ill = True
        await backend.probe()
        ill = Anthropic("c", server.url, pool="p", options=AnthropicOptions(asks_every_s=0))
        with pytest.raises(BackendFailed, match="500"):
            await ill.probe()
        await ill.close()
