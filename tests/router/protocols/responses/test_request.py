"""OpenAI's Responses API: read into an Ask that any backend can answer, written as its clients expect."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputMessage

from backends.openai.responses import RESPONSES_PATH, PassedResponse
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Capability, Delta, TokenLogprob, Usage
from router.protocols.dialect import Head, usage_sum
from router.protocols.http import endpoints
from router.protocols.responses.answers import ResponseStream
from router.protocols.responses.request import responses_ask
from tests.conformance.scripted_engine import response_events
from tests.router.parts import KEY, MODEL, ScriptedBackend, a_client, a_router, an_answer
from tests.router.protocols.anthropic.test_request import a_call
from tests.router.protocols.openai.test_request import anything, scalars

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


def a_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **fields}


def a_chat_body(**fields: Any) -> dict[str, Any]:
    (body,) = responses_ask(a_body(**fields), {}).bodies
    return dict(body)


def official(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def test_a_text_with_instructions_is_a_chat() -> None:
    body = a_chat_body(instructions="Be brief.", max_output_tokens=9, temperature=0.5, user="u", store=True)
    assert body == {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "user": "u",
    }


def test_what_is_not_of_this_api_reaches_the_backend_all_the_same() -> None:
    beyond = {"top_k": 5, "seed": 7, "service_tier": "flex", "prompt_cache_key": "k", "vendor": {"a": [1]}}
    idle = {"truncation": "auto", "max_tool_calls": 3, "stream_options": {"include_obfuscation": False}, "store": True}
    body = a_chat_body(**beyond, **idle, metadata={"a": "b"})
    assert body == {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **beyond}


def test_rules_see_the_metadata_of_a_response() -> None:
    assert responses_ask(a_body(metadata={"team": "red"}), {}).metadata == {"team": "red"}


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [("max_tokens", 5, "max_output_tokens"), ("messages", [], "input"), ("n", 2, "several calls")],
)
def test_fields_of_chats_are_refused_with_the_ones_to_use(name: str, value: Any, instead: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        responses_ask(a_body(**{name: value}), {})
    assert failure.value.param == name
    assert instead in failure.value.hint


def test_items_of_one_turn_become_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A moment."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"at":1}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "wet"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "dry"}]},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]
    assert a_chat_body(input=items)["messages"] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "A moment.", "reasoning_content": "Look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "wet"},
        {"role": "tool", "tool_call_id": "c2", "content": "dry"},
    ]


def test_tools_shapes_and_effort_have_the_names_of_chats() -> None:
    schema = {"type": "object", "properties": {}}
    body = a_chat_body(
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "json_schema", "name": "s", "schema": schema}, "verbosity": "low"},
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
    )
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert body["response_format"] == {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    assert (body["reasoning_effort"], body["verbosity"], body["logprobs"]) == ("low", "low", True)


def test_images_and_files_are_parts_of_a_chat() -> None:
    parts = [
        {"type": "input_text", "text": "Look:"},
        {"type": "input_image", "image_url": "https://x/y.png", "detail": "low"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"},
    ]
    ask = responses_ask(a_body(input=[{"role": "user", "content": parts}]), {})
    assert ask.bodies[0]["messages"][-1]["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "low"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}},
    ]
    assert ask.needs == {Capability.MEDIA}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_name_with_a_hint(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        responses_ask(a_body(**fields), {})
    assert failure.value.param == param
    assert failure.value.hint


item = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "x"]),
        "role": st.sampled_from(["user", "assistant", "system", "x"]),
        "content": anything,
        "call_id": st.text(max_size=3),
        "arguments": scalars,
        "output": anything,
    },
)


@settings(deadline=None)
@given(st.lists(item, max_size=4) | anything, st.dictionaries(st.sampled_from(["tools", "tool_choice"]), anything))
def test_any_object_is_an_ask_or_an_invalid_request(given_input: Any, fields: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        json.dumps(responses_ask(a_body(input=given_input, **fields), {}).bodies[0])


def a_script() -> list[Any]:
    logprob = TokenLogprob(1, "A", -0.5, (TokenLogprob(2, "B", -1.0),))
    return [
        Delta(computed_tokens=2),
        Delta(message={"reasoning_content": "Hm"}),
        Delta(message={"reasoning_content": "."}),
        Delta(text="A", token_ids=(1,), logprobs=(logprob,)),
        Delta(text=" moment.", token_ids=(2,)),
        a_call(0, '{"at": ', "c1", "weather"),
        a_call(0, "1}"),
        a_call(1, "", "c2", "weather"),
        Delta(finish_reason="tool_calls", usage=Usage(7, 5, 3)),
    ]


def check(response: Any) -> None:
    assert [output.type for output in response.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, first, second = response.output
    assert thought.content[0].text == "Hm."
    assert (message.content[0].text, message.status) == ("A moment.", "completed")
    assert message.content[0].logprobs[0].top_logprobs[0].token == "B"
    assert (first.call_id, first.name, first.arguments) == ("c1", "weather", '{"at": 1}')
    assert (second.call_id, second.arguments) == ("c2", "{}")
    assert (response.status, response.output_text, response.error) == ("completed", "A moment.", None)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, 5)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.tools[0].name == "weather"
    assert len({output.id for output in response.output}) == 4


async def test_the_official_client_reads_a_whole_response() -> None:
    async with a_router(ScriptedBackend(scripts=[a_script()])) as router, official(router.http_url) as client:
        answer = await client.responses.create(**a_body(tools=[WEATHER], top_logprobs=1))
    check(answer)
    assert answer.id.startswith("resp_")
    assert answer.store is False  # type: ignore[attr-defined]


async def test_the_official_client_streams_a_conversation_with_tool_calls() -> None:
    backend = ScriptedBackend(scripts=[a_script(), an_answer("It", " rains.")])
    async with a_router(backend) as router, official(router.http_url) as client:
        async with client.responses.stream(**a_body(tools=[WEATHER], top_logprobs=1)) as stream:
            events = [event async for event in stream]
            answer = await stream.get_final_response()
        check(answer)
        history: list[Any] = [{"role": "user", "content": "hi"}, *(output.to_dict() for output in answer.output)]
        calls = [output for output in answer.output if output.type == "function_call"]
        history += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
        async with client.responses.stream(model=MODEL, input=history) as stream:
            last = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for begun, done in (("output_item.added", "output_item.done"), ("content_part.added", "content_part.done")):
        assert kinds.count(f"response.{begun}") == kinds.count(f"response.{done}") > 0
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "A moment."
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"at": 1}'
    assert last.output_text == "It rains."
    body = backend.prompts[1].body
    assert body is not None
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool", "tool"]


def test_long_silences_have_events_that_are_numbered_like_the_others() -> None:
    stream = ResponseStream(Head("resp_1", 1, MODEL), {"input": "hi"})
    raw = stream.progress("prefill 1/9") + stream.progress("prefill 2/9") + stream.render(0, Delta("ok"))
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]
    begun = ["response.created", "response.in_progress", "keepalive", "keepalive", "response.output_item.added"]
    assert [event["type"] for event in events[:5]] == begun
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert b": prefill 1/9" in raw


@pytest.mark.parametrize("call", [None, ("call_1", "run", '{"command": "ls"}')], ids=["text", "call"])
@pytest.mark.parametrize("is_renamed", [False, True])
async def test_an_engines_own_events_behind_ours_are_of_one_response(
    call: Any, is_renamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "PROGRESS_EVERY_S", 0.0)
    passed = PassedResponse("b1", shown_model=MODEL if is_renamed else None)
    own = [delta for event in response_events(call, "a b c") for delta in passed.feed(event)]
    # a shard fails in prefill, and an engine that speaks the dialect answers
    scripts: list[Any] = [[Delta(computed_tokens=1), Delta(computed_tokens=2), BackendFailed("gone")], own]
    backends = (ScriptedBackend(scripts=scripts), ScriptedBackend("b1", scripts=scripts))
    async with (
        a_router(*backends) as router,
        official(router.http_url) as client,
        client.responses.stream(**a_body()) as stream,
    ):
        events = [event async for event in stream]
        answer = await stream.get_final_response()
    kinds: list[str] = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "keepalive", "keepalive"]
    assert kinds[-1] == "response.completed"
    assert [kinds.count(kind) for kind in (kinds[0], kinds[1], kinds[-1])] == [1, 1, 1]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert answer.output_text == ("a b c" if call is None else "")
    assert [item.type for item in answer.output] == ["message" if call is None else "function_call"]


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
async def test_an_answer_that_was_cut_short_is_incomplete(finish: str, reason: str) -> None:
    script: list[Any] = [Delta(text="a", token_ids=(1,)), Delta(finish_reason=finish, usage=Usage(1, 1))]
    backend = ScriptedBackend(scripts=[list(script), list(script)])
    async with a_router(backend) as router, official(router.http_url) as client:
        whole = await client.responses.create(**a_body())
        stream = await client.responses.create(**a_body(), stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    for response in (whole, events[-1].response):
        assert response.incomplete_details is not None
        assert (response.status, response.incomplete_details.reason) == ("incomplete", reason)
        assert [output.status for output in response.output] == ["incomplete"]  # type: ignore[union-attr]


@pytest.mark.parametrize(("reported", "shown"), [(3, 3), (0, 0), (None, 0)])
async def test_thoughts_are_counted_as_the_backend_counts_them(reported: int | None, shown: int) -> None:
    script: list[Any] = [Delta(text="a", token_ids=(1,)), Delta(finish_reason="stop", usage=Usage(1, 4, 0, reported))]
    backend = ScriptedBackend(scripts=[list(script) for _ in range(4)])
    async with a_router(backend) as router, official(router.http_url) as client:
        whole = await client.responses.create(**a_body())
        stream = await client.responses.create(**a_body(), stream=True)
        last = [event async for event in stream][-1].response  # type: ignore[union-attr]
        chat = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        two = await client.completions.create(model=MODEL, prompt="hi")
    for response in (whole, last):
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == shown
    for answer in (chat, two):
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert (details and details.reasoning_tokens) == reported


async def test_a_sum_in_which_some_thoughts_are_not_counted_is_none() -> None:
    assert usage_sum([Usage(1, 2, 0, 3), Usage(1, 2, 0, 4)]) == Usage(2, 4, 0, 7)
    assert usage_sum([Usage(1, 2, 0, 3), Usage(1, 2, 0)]) == Usage(2, 4, 0, None)


async def test_a_refusal_is_a_part_of_its_own_and_comes_back_as_text() -> None:
    script: list[Any] = [
        Delta(message={"refusal": "I can"}),
        Delta(message={"refusal": "not."}),
        Delta(finish_reason="stop", usage=Usage(1, 2)),
    ]
    backend = ScriptedBackend(scripts=[list(script), list(script), an_answer("Well")])
    async with a_router(backend) as router, official(router.http_url) as client:
        whole = await client.responses.create(**a_body())
        async with client.responses.stream(**a_body()) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        for response in (whole, streamed):
            (message,) = response.output
            assert isinstance(message, ResponseOutputMessage)
            assert [part.to_dict() for part in message.content] == [{"type": "refusal", "refusal": "I cannot."}]
        history: list[Any] = [{"role": "user", "content": "hi"}, *(output.to_dict() for output in whole.output)]
        await client.responses.create(model=MODEL, input=[*history, {"role": "user", "content": "why?"}])
    deltas = [event.delta for event in events if event.type == "response.refusal.delta"]
    assert deltas == ["I can", "not."]
    assert [event.refusal for event in events if event.type == "response.refusal.done"] == ["I cannot."]
    body = backend.prompts[2].body
    assert body is not None
    assert body["messages"][1] == {"role": "assistant", "content": "I cannot."}


async def test_a_stream_that_breaks_off_ends_with_an_error_and_a_failed_response() -> None:
    script: list[Any] = [Delta(text="half", token_ids=(1,)), BackendFailed("gone")]
    async with a_router(ScriptedBackend(scripts=[script])) as router, official(router.http_url) as client:
        stream = await client.responses.create(**a_body(), stream=True)
        events = [event async for event in stream]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].message == BackendFailed.masked_message  # type: ignore[union-attr]
    assert events[-1].response.error.code == "backend_failed"  # type: ignore[union-attr]


async def test_refusals_have_openais_shape() -> None:
    async with a_router() as router, official(router.http_url) as client, a_client(router) as plain:
        with pytest.raises(openai.BadRequestError, match="whole conversation"):
            await client.responses.create(**a_body(previous_response_id="resp_1"))
        with pytest.raises(openai.NotFoundError, match="did you mean"):
            await client.responses.create(model="tinny", input="x")
        status, body = await plain.answer(RESPONSES_PATH, data=b"[]")
        assert (status, body["error"]["code"]) == (400, "invalid_request")
