"""Anthropic's messages API: read into an Ask that any backend can answer, written as its clients expect."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.messages.answer import MESSAGES_PATH
from policies.errors import BackendFailed, ContextExceeded, InvalidRequest, Overloaded, QuotaExceeded
from policies.nouns import Capability, Delta, Usage
from router.ask import Chat
from router.protocols.anthropic.request import COUNT_PATH, messages_ask
from router.text.documents import written
from tests.router.parts import CONTEXT_TOKENS, KEY, MODEL, ScriptedBackend, a_client, a_router, an_answer
from tests.router.protocols.openai.test_request import anything, scalars

WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object", "properties": {}}}


def a_message(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], **fields}


def an_openai_body(**fields: Any) -> dict[str, Any]:
    (body,) = messages_ask(a_message(**fields), {}).bodies
    return dict(body)


def a_call(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> Delta:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    call = {"index": index, "function": function} | ({"id": call_id, "type": "function"} if call_id else {})
    return Delta(message={"tool_calls": [call]})


def official(url: str, key: str = KEY) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


def test_a_conversation_with_tools_says_the_same_in_openais_words() -> None:
    body = an_openai_body(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look it up.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "A moment."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"at": "Köln"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "wet"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no such town", "is_error": True},
                    {"type": "text", "text": "And tomorrow?"},
                ],
            },
        ],
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=4,
        metadata={"user_id": "u1"},
    )
    function = {"name": "weather", "arguments": '{"at":"Köln"}'}
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "A moment.",
            "reasoning_content": "Look it up.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "wet"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such town"},
        {"role": "user", "content": "And tomorrow?"},
    ]
    parameters = {"name": "weather", "description": "Tells it.", "parameters": WEATHER["input_schema"]}
    assert body["tools"] == [{"type": "function", "function": parameters}]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert (body["stop"], body["temperature"], body["top_k"], body["user"]) == (["END"], 0.5, 4, "u1")
    assert body["max_tokens"] == 100


def test_what_is_not_of_this_api_reaches_other_backends_too_but_for_hints() -> None:
    beyond = {"min_p": 0.1, "seed": 7, "vendor": {"a": [1]}, "mcp_servers": [{"name": "x"}]}
    hints = {"service_tier": "auto", "context_management": {"edits": []}, "cache_control": {"type": "ephemeral"}}
    body = an_openai_body(**beyond, **hints)
    assert body == {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], **beyond}


@pytest.mark.parametrize("name", ["n", "logprobs", "response_format", "max_completion_tokens"])
def test_words_of_openais_chats_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        an_openai_body(**{name: 2})
    assert failure.value.param == name


def test_rules_see_the_user_of_a_message() -> None:
    assert messages_ask(a_message(metadata={"user_id": "u"}), {}).metadata == {"user_id": "u"}


def test_a_tool_that_is_strict_stays_so() -> None:
    (tool,) = an_openai_body(tools=[{**WEATHER, "strict": True}])["tools"]
    assert tool["function"]["strict"] is True


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_tool_choices_have_openais_names(choice: dict[str, Any], expected: Any) -> None:
    assert an_openai_body(tools=[WEATHER], tool_choice=choice)["tool_choice"] == expected


def test_marks_for_the_cache_stay_where_they_were() -> None:
    mark = {"type": "ephemeral"}
    body = an_openai_body(
        system=[{"type": "text", "text": "Long.", "cache_control": mark}], tools=[{**WEATHER, "cache_control": mark}]
    )
    assert body["messages"][0]["content"] == [{"type": "text", "text": "Long.", "cache_control": mark}]
    assert body["tools"][0]["cache_control"] == mark


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_whether_to_think_reaches_the_template(kind: str, thinks: bool) -> None:
    (chat,) = messages_ask(a_message(thinking={"type": kind, "budget_tokens": 1024}), {}).inputs
    assert isinstance(chat, Chat)
    assert chat.variables == {"enable_thinking": thinks}


def test_a_last_message_of_the_assistant_is_continued() -> None:
    turns = [{"role": "user", "content": "Sun?"}, {"role": "assistant", "content": "The answer is ("}]
    (chat,) = messages_ask(a_message(messages=turns), {}).inputs
    assert isinstance(chat, Chat)
    assert (chat.continues, chat.opens_answer) == (True, False)


def test_a_shape_and_an_effort_have_openais_names() -> None:
    schema = {"type": "object", "properties": {}}
    body = an_openai_body(output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert body["reasoning_effort"] == "low"
    assert body["response_format"]["json_schema"]["schema"] == schema


def test_images_and_documents_are_parts_in_results_of_tools_too() -> None:
    png = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image = {"type": "image", "source": png, "cache_control": {"type": "ephemeral"}}
    page = {"type": "document", "title": "T", "source": {**png, "media_type": "application/pdf"}}
    seen = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [seen], "is_error": True}
    ask = messages_ask(a_message(messages=[{"role": "user", "content": [result, image, page]}]), {})
    assert ask.needs == {Capability.MEDIA}
    there = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    by_value = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    file = {"type": "file", "file": {"filename": "T", "file_data": "data:application/pdf;base64,AAAA"}}
    assert ask.bodies[0]["messages"] == [
        {"role": "tool", "tool_call_id": "t", "content": [{"type": "text", "text": "Error: "}, there]},
        {"role": "user", "content": [{**by_value, "cache_control": {"type": "ephemeral"}}, file]},
    ]


def test_documents_and_search_results_of_plain_text_are_text() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    result = {"type": "search_result", "source": "s", "title": "R", "content": [{"type": "text", "text": "E"}]}
    body = an_openai_body(messages=[{"role": "user", "content": [document, result]}])
    assert body["messages"] == [{"role": "user", "content": "T\nDR\nE"}]


def a_document(text: str) -> dict[str, Any]:
    return {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": text}}


RESULT = {"type": "search_result", "source": "https://s", "title": "R", "content": [{"type": "text", "text": "E"}]}


def test_with_an_order_documents_and_search_results_are_documents_of_the_chat() -> None:
    question = {"type": "text", "text": "Who?"}
    first = {"role": "user", "content": [question, a_document("D"), RESULT, question]}
    second = {"role": "user", "content": [a_document("later"), question]}
    turns = [first, {"role": "assistant", "content": "She."}, second]
    ask = messages_ask(a_message(messages=turns, document_order="any"), {})
    assert ask.documents is not None
    assert ask.documents.is_free
    assert [(document.id[:9], document.title, document.text) for document in ask.documents.each] == [
        (ask.documents.each[0].id[:9], "T", "D"),
        ("https://s", "R", "E"),
    ]
    assert [message["content"] for message in ask.bodies[0]["messages"]] == [
        "Who?{{documents}}Who?",
        "She.",
        "T\nlaterWho?",
    ]
    prompt = written(ask).bodies[0]["messages"][0]["content"]
    assert prompt.startswith("Who?Documents:\n\nDocument ")
    assert "Document https://s: R\nE\n\nWho?" in prompt


def test_an_order_without_documents_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="`document_order` needs `documents`"):
        messages_ask(a_message(document_order="any"), {})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name_with_a_hint(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        messages_ask(a_message(**fields), {})
    assert failure.value.param == param
    assert failure.value.hint


def test_another_version_is_not_spoken() -> None:
    with pytest.raises(InvalidRequest, match="2026-10-21"):
        messages_ask(a_message(), {"anthropic-version": "2030-01-01"})


block = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "document", "image"])},
    optional={
        "text": scalars,
        "id": st.text(max_size=3),
        "name": st.text(max_size=3),
        "input": anything,
        "tool_use_id": st.text(max_size=3),
        "content": anything,
        "source": anything,
    },
)
turn = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.lists(block, max_size=3) | anything}
)


@settings(deadline=None)
@given(st.lists(turn, max_size=3), st.dictionaries(st.sampled_from(["system", "tools", "tool_choice"]), anything))
def test_any_object_is_an_ask_or_an_invalid_request(messages: list[Any], fields: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        ask = messages_ask({**a_message(messages=messages), **fields}, {})
        assert ask.natives[0].path == MESSAGES_PATH
        json.dumps(ask.bodies[0])


async def test_the_official_client_reads_a_whole_message_with_tools_and_thinking() -> None:
    script: list[Any] = [
        Delta(message={"reasoning_content": "Hm."}),
        Delta(text="A moment.", token_ids=(1,)),
        a_call(0, '{"at":', "t1", "weather"),
        a_call(0, '"Bonn"}'),
        a_call(1, "nonsense", "t2", "weather"),
        Delta(finish_reason="tool_calls", usage=Usage(7, 5, 3)),
    ]
    backend = ScriptedBackend(scripts=[script])
    async with a_router(backend) as router, official(router.http_url) as client:
        reply = await client.messages.create(**a_message(tools=[WEATHER]))
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in reply.content if block.type == "tool_use"] == [
        {"at": "Bonn"},
        {"INVALID_JSON": "nonsense"},
    ]
    assert (reply.stop_reason, reply.stop_sequence, reply.model) == ("tool_use", None, MODEL)
    usage = reply.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 3, 5)
    assert reply.id.startswith("msg_")
    assert reply._request_id == reply.id.removeprefix("msg_")


async def test_the_official_client_streams_a_conversation_with_tool_calls() -> None:
    first: list[Any] = [
        Delta(computed_tokens=2),
        Delta(message={"reasoning": "Let me "}),
        Delta(message={"reasoning": "look."}),
        Delta(message={"thinking_blocks": [{"type": "thinking", "thinking": "Let me look.", "signature": "sig"}]}),
        Delta(text="A ", token_ids=(1,)),
        Delta(text="moment.", token_ids=(2,)),
        a_call(0, "", "t1", "weather"),
        a_call(0, '{"at": "B'),
        a_call(0, 'onn"}'),
        a_call(1, "{}", "t2", "weather"),
        Delta(finish_reason="stop", usage=Usage(7, 9)),
    ]
    backend = ScriptedBackend(scripts=[first, an_answer("It", " rains.")])
    async with a_router(backend) as router, official(router.http_url) as client:
        async with client.messages.stream(**a_message(tools=[WEATHER])) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_message()
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        history = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            {"role": "user", "content": results},
        ]
        async with client.messages.stream(**a_message(messages=history, tools=[WEATHER])) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            last = await stream.get_final_message()
    thinking, words, weather, time_call = answer.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Let me look.", "sig")
    assert (words.type, words.text) == ("text", "A moment.")
    assert (weather.type, weather.id, weather.name, weather.input) == ("tool_use", "t1", "weather", {"at": "Bonn"})
    assert (time_call.type, time_call.id, time_call.input) == ("tool_use", "t2", {})
    assert (answer.stop_reason, answer.usage.output_tokens) == ("tool_use", 9)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert (text, last.stop_reason) == ("It rains.", "end_turn")
    body = backend.prompts[1].body
    assert body is not None
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool", "tool"]
    native = backend.prompts[1].native
    assert native is not None
    assert native.body == {**a_message(messages=history, tools=[WEATHER]), "stream": True}


async def test_headers_that_an_anthropic_backend_needs_go_with_the_prompt() -> None:
    backend = ScriptedBackend()
    headers = {"anthropic-beta": "context-management-2025-06-27,x-1", "anthropic-version": "2023-06-01"}
    async with a_router(backend) as router, a_client(router) as client:
        await client.answer(MESSAGES_PATH, a_message(), headers={**headers, "anthropic-other": "no"})
        await client.answer(MESSAGES_PATH, a_message())
    assert [prompt.headers for prompt in backend.prompts] == [headers, {}]


@pytest.mark.parametrize("finish", ["stop", "content_filter"])
async def test_what_openais_models_say_to_refuse_is_text_and_a_refusal(finish: str) -> None:
    script: list[Any] = [
        Delta(message={"refusal": "I can"}),
        Delta(message={"refusal": "not."}),
        Delta(finish_reason=finish, usage=Usage(1, 2)),
    ]
    backend = ScriptedBackend(scripts=[list(script), list(script)])
    async with a_router(backend) as router, official(router.http_url) as client:
        whole = await client.messages.create(**a_message())
        async with client.messages.stream(**a_message()) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [(block.type, getattr(block, "text", "")) for block in message.content] == [("text", "I cannot.")]
        assert message.stop_reason == "refusal"


async def test_message_start_has_the_prompts_length() -> None:
    async with a_router() as router, a_client(router) as client:
        async with client.post(MESSAGES_PATH, a_message(stream=True)) as reply:
            assert reply.content_type == "text/event-stream"
            events = (await reply.read()).decode().split("\n\n")
        _, counted = await client.answer(COUNT_PATH, a_message())
    start = json.loads(events[0].partition("\ndata: ")[2])
    assert start["message"]["usage"]["input_tokens"] == counted["input_tokens"] > 0


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (Delta(finish_reason="stop"), "end_turn", None),
        (Delta(finish_reason="length"), "max_tokens", None),
        (Delta(finish_reason="content_filter"), "refusal", None),
        (Delta(finish_reason="stop", stop="END"), "stop_sequence", "END"),
    ],
)
async def test_why_it_stopped_has_anthropics_words(last: Delta, reason: str, sequence: str | None) -> None:
    script: list[Any] = [Delta(text="a", token_ids=(1,)), last, Delta(usage=Usage(1, 1))]
    backend = ScriptedBackend(scripts=[list(script), list(script)])
    async with a_router(backend) as router, official(router.http_url) as client:
        whole = await client.messages.create(**a_message(stop_sequences=["END"]))
        async with client.messages.stream(**a_message(stop_sequences=["END"])) as stream:
            streamed = await stream.get_final_message()
    for reply in (whole, streamed):
        assert (reply.stop_reason, reply.stop_sequence) == (reason, sequence)


async def test_pings_keep_the_connection_of_a_long_prefill() -> None:
    time = [0.0]

    class Ticking(ScriptedBackend):
        async def generate(self, request: Any, prompt: Any) -> Any:
            for second in range(1, 4):
                time[0] += 1.0
                yield Delta(computed_tokens=second)
            for delta in an_answer("a"):
                yield delta

    async with (
        a_router(Ticking(), clock=lambda: time[0]) as router,
        a_client(router) as client,
        client.post(MESSAGES_PATH, a_message(stream=True)) as reply,
    ):
        text = (await reply.read()).decode()
    assert text.startswith(": prefill 1/")
    assert text.count("event: ping") == 3
    assert text.index("event: ping") < text.index("event: message_start")


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (InvalidRequest("no"), 400, "invalid_request_error"),
        (ContextExceeded("long"), 400, "invalid_request_error"),
        (QuotaExceeded("much"), 429, "rate_limit_error"),
        (Overloaded("full", retry_after_s=2), 529, "overloaded_error"),
        (BackendFailed("gone"), 502, "api_error"),
        (RuntimeError("secret"), 500, "api_error"),
    ],
)
async def test_failures_have_anthropics_types_and_statuses(failure: Exception, status: int, kind: str) -> None:
    async with a_router(ScriptedBackend(scripts=[[failure]])) as router, official(router.http_url) as client:
        with pytest.raises(anthropic.APIStatusError) as refusal:
            await client.messages.create(**a_message())
    error = refusal.value
    assert error.status_code == status
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == kind
    assert "secret" not in str(error.body)
    assert error.request_id


async def test_wrong_keys_models_and_routes_are_answered_in_anthropics_shape() -> None:
    async with a_router() as router, a_client(router) as client:
        async with official(router.http_url, key="nope") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**a_message())
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        async with official(router.http_url) as known:
            with pytest.raises(anthropic.NotFoundError, match="did you mean"):
                await known.messages.create(**a_message(model="tinny"))
        async with client.get(MESSAGES_PATH) as reply:
            assert (reply.status, (await reply.json())["type"]) == (405, "error")
        status, body = await client.answer(f"{MESSAGES_PATH}/batches", a_message())
        assert (status, body["error"]["type"]) == (404, "not_found_error")
        status, body = await client.answer("/v1/message", headers={"anthropic-version": "2023-06-01"})
        assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
        status, body = await client.answer("/v1/prefixes", {}, headers={"anthropic-version": "2023-06-01"})
        assert (status, body["error"]["code"]) == (400, "invalid_request")
        status, body = await client.answer(MESSAGES_PATH, data=b"{")
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")


async def test_the_official_client_lists_models_and_finds_one() -> None:
    async with a_router() as router, official(router.http_url) as client:
        listed = [model async for model in await client.models.list()]
        found = await client.models.retrieve(MODEL)
        for model in (*listed, found):
            assert (model.type, model.id, model.display_name) == ("model", MODEL, MODEL)
            assert model.max_input_tokens == CONTEXT_TOKENS
        with pytest.raises(anthropic.NotFoundError) as failure:
            await client.models.retrieve("other")
    assert failure.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    script: list[Any] = [Delta(text="half", token_ids=(1,)), BackendFailed("gone")]
    async with a_router(ScriptedBackend(scripts=[script])) as router, official(router.http_url) as client:
        with pytest.raises(anthropic.APIStatusError, match="the backend that had the request failed"):
            async with client.messages.stream(**a_message()) as stream:
                await stream.until_done()


async def test_the_official_client_counts_tokens() -> None:
    async with a_router() as router, official(router.http_url) as client:
        counted = await client.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "the fox"}], system="the dog", tools=[WEATHER]
        )
        less = await client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "the fox"}])
    assert counted.input_tokens > less.input_tokens > 0


async def test_tokens_cannot_be_counted_without_a_tokenizer() -> None:
    async with a_router(ScriptedBackend(speaks_tokens=False)) as router, official(router.http_url) as client:
        with pytest.raises(anthropic.InternalServerError, match="tokenizer"):
            await client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "a"}])


async def test_a_client_that_hangs_up_cancels_the_backend() -> None:
    backend = ScriptedBackend(scripts=[[Delta(text="a", token_ids=(1,)), asyncio.Event()]])
    async with a_router(backend) as router, a_client(router) as client:
        calling = asyncio.create_task(client.answer(MESSAGES_PATH, a_message(stream=True)))
        await backend.began.wait()
        calling.cancel()
        await asyncio.wait_for(backend.cancelled.wait(), 5)
        await asyncio.gather(calling, return_exceptions=True)


BILLED = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"


@pytest.mark.parametrize("mark", [{}, {"cache_control": {"type": "ephemeral"}}])
@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ([BILLED, "You are Claude Code.", " Be brief."], "You are Claude Code. Be brief."),
        ([BILLED, "first line\nsecond line"], "first line\nsecond line"),
        (["You are.", BILLED, "Be brief."], "You are.Be brief."),
        ([BILLED + "\nin the same block"], "in the same block"),
        ([BILLED], None),
        (["It says " + BILLED], "It says " + BILLED),
    ],
)
def test_of_system_blocks_only_the_one_that_bills_is_dropped_for_backends_of_another_dialect(
    system: list[str], kept: str | None, mark: dict[str, Any]
) -> None:
    blocks = [{"type": "text", "text": text, **mark} for text in system]
    body = {"model": "m", "max_tokens": 5, "system": blocks, "messages": [{"role": "user", "content": "Hi"}]}
    ask = messages_ask(body, {})
    sent = [message["content"] for message in ask.bodies[0]["messages"] if message["role"] == "system"]
    texts = ["".join(part["text"] for part in each) if isinstance(each, list) else each for each in sent]
    assert texts == ([] if kept is None else [kept])
    read = [message["content"] for message in ask.inputs[0].messages if message["role"] == "system"]  # type: ignore[union-attr]
    assert read == ([] if kept is None else [kept if not mark else "\n".join(part["text"] for part in sent[0])])
    assert ask.natives[0].body is body


def test_a_system_text_loses_the_line_that_bills() -> None:
    body = {
        "model": "m",
        "max_tokens": 5,
        "system": BILLED + "\nBe brief.",
        "messages": [{"role": "user", "content": "Hi"}],
    }
    assert messages_ask(body, {}).bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
