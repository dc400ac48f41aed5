"""Parsing OpenAI's bodies: what comes out, and that nothing but InvalidRequest is ever raised."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import InvalidRequest
from policies.learning.text_length import MEDIA_TOKENS, TextLength
from policies.nouns import Capability
from router.ask import Ask, Chat, Reading
from router.protocols.dialect import decode
from router.protocols.openai.request import MEDIA_PARTS, chat_ask, completion_ask
from router.text.estimates import estimated
from tests.router.parts import CHAT, COMPLETIONS, ScriptedBackend, a_chat, a_client, a_router, an_answer

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KNOWN = [
    "messages", "prompt", "stream", "stream_options", "max_tokens", "temperature", "top_p", "n", "stop", "seed",
    "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", "echo", "suffix", "best_of", "top_k",
    "stop_token_ids", "min_tokens", "chat_template_kwargs", "user", "max_completion_tokens", "continue_final_message",
]  # fmt: skip
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
    optional={"content": anything, "tool_calls": anything, "name": anything},
)
body = st.fixed_dictionaries({"model": st.just("tiny") | anything}).flatmap(
    lambda base: st.dictionaries(st.sampled_from(KNOWN), anything, max_size=5).map(lambda more: {**base, **more})
)
plausible = st.builds(
    lambda base, messages, prompt: {"messages": messages, "prompt": prompt, **base, "model": "tiny", "max_tokens": 3},
    st.dictionaries(st.sampled_from(KNOWN), anything, max_size=2),
    st.lists(message, max_size=3),
    anything,
)


@settings(deadline=None)
@given(st.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_an_invalid_request(raw: bytes) -> None:
    with suppress(InvalidRequest):
        assert isinstance(decode(raw), dict)


@settings(deadline=None)
@given(body | plausible)
def test_any_object_is_an_ask_or_an_invalid_request(fields: dict[str, Any]) -> None:
    for parse in (chat_ask, completion_ask):
        with suppress(InvalidRequest):
            ask = parse(decode(json.dumps(fields).encode()))
            assert ask.inputs
            assert len(ask.inputs) == len(ask.bodies)


async def test_arbitrary_json_never_makes_the_live_handler_fail() -> None:
    """A few hundred bodies against one running router: each gets an answer or a 4xx."""
    bodies: list[dict[str, Any]] = []

    @settings(deadline=None, database=None)
    @given(plausible | body)
    def collect(fields: dict[str, Any]) -> None:
        bodies.append(fields)

    collect()
    async with a_router() as router, a_client(router) as client:
        for fields in bodies[:150]:
            for path in (CHAT, COMPLETIONS):
                async with client.post(path, fields) as reply:
                    text = await reply.text()
                    assert reply.status in (200, 400, 404), (fields, text)


def messages_of(*messages: dict[str, Any], **fields: Any) -> Chat:
    (chat,) = chat_ask({"model": "m", "messages": [*messages, {"role": "user", "content": "?"}], **fields}).inputs
    assert isinstance(chat, Chat)
    return chat


def test_text_parts_become_lines_of_one_text_and_stay_parts_for_templates_that_want_them() -> None:
    marked = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}, "uuid": "1"}
    chat = messages_of({"role": "user", "content": [{"type": "text", "text": "a"}, "plain", marked]})
    assert chat.messages[0] == {"role": "user", "content": "a\nplain\nb"}
    assert chat.parts == {
        0: [
            {"type": "text", "text": "a"},
            {"type": "text", "text": "plain"},
            {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
        ]
    }


def test_messages_have_the_members_that_engines_pass_on_in_their_order() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"b": 1, "a": 2.50}'}}
    chat = messages_of(
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": "no", "reasoning_content": "hm"},
        {"tool_call_id": "c", "role": "tool", "content": "5", "extra": 1},
        {"role": "user", "name": "bob", "content": "x", "tool_calls": []},
    )
    assistant, tool, user, _ = chat.messages
    assert json.dumps(assistant) == json.dumps(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "function": {"arguments": {"b": 1, "a": 2.5}, "name": "f"}, "type": "function"}],
            "reasoning": "hm",
            "reasoning_content": "hm",
        }
    )
    assert (tool, user) == (
        {"role": "tool", "content": "5", "tool_call_id": "c"},
        {"role": "user", "content": "x", "name": "bob"},
    )
    assert chat.parts == {0: []}


@pytest.mark.parametrize("arguments", ["{", "", None, "[1]", "5", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: str | None) -> None:
    call = {"id": "d", "type": "function", "function": {"name": "g", "arguments": arguments}}
    chat = messages_of({"role": "assistant", "content": "x", "tool_calls": [call]})
    assert chat.messages[0]["tool_calls"][0]["function"] == {"arguments": {}, "name": "g"}


def test_a_line_that_only_bills_is_left_out_of_system_messages_alone() -> None:
    billed = "x-anthropic-billing-header: cch=1"
    chat = messages_of(
        {"role": "system", "content": [{"type": "text", "text": billed}, {"type": "text", "text": "s"}]},
        {"role": "system", "content": f"{billed}\nrest"},
        {"role": "user", "content": billed},
    )
    assert [message["content"] for message in chat.messages] == ["s", "rest", billed, "?"]


def test_effort_and_whether_to_think_are_variables_of_the_template() -> None:
    assert messages_of(reasoning_effort="low").variables == {
        "reasoning_effort": "low",
        "enable_thinking": True,
    }
    assert messages_of(reasoning_effort="none").variables["enable_thinking"] is False
    ask = messages_of(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "x": 1})
    assert ask.variables == {"enable_thinking": True, "x": 1, "reasoning_effort": "none"}


def test_a_template_of_the_clients_own_is_known_wherever_it_stands() -> None:
    assert messages_of().template is None
    assert messages_of(chat_template="a").template == "a"
    assert messages_of(chat_template_kwargs={"chat_template": "b"}).template == "b"


def test_how_prompts_are_to_be_read_is_read_from_both_endpoints() -> None:
    fields = {"add_special_tokens": False, "truncate_prompt_tokens": 5, "truncation_side": "right"}
    expected = Reading(adds_special=False, most_tokens=5, keeps_start=True)
    assert chat_ask(a_chat(**fields)).reading == expected
    assert completion_ask({"model": "m", "prompt": "a", **fields}).reading == expected
    assert chat_ask(a_chat()).reading == Reading()


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def with_parts(*parts: dict[str, Any]) -> Ask:
    return chat_ask(a_chat(messages=[{"role": "user", "content": list(parts)}]))


def test_a_refusal_is_text_of_the_conversation_where_it_is_a_part() -> None:
    part = {"type": "refusal", "refusal": "No."}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [part]},
        {"role": "assistant", "content": None, "refusal": "Never."},
        {"role": "user", "content": "b"},
    ]
    (chat,) = chat_ask(a_chat(messages=messages)).inputs
    assert isinstance(chat, Chat)
    assert [message["content"] for message in chat.messages] == ["a", "No.", "", "b"]


@pytest.mark.parametrize("kind", sorted(MEDIA_PARTS))
def test_what_is_no_text_needs_a_backend_that_sees_and_hears(kind: str) -> None:
    ask = with_parts({"type": "text", "text": "Look:"}, {"type": kind, kind: {"url": "x"}})
    assert ask.needs == {Capability.MEDIA}
    (tokens,) = estimated(ask, 1, TextLength())
    assert MEDIA_TOKENS < tokens.count < 2 * MEDIA_TOKENS


def test_the_urls_of_all_parts_are_known_and_a_chat_of_texts_has_none() -> None:
    urls = ["https://a/1.png", "https://a/2.mp4"]
    media = [{"type": kind, kind: {"url": url}} for kind, url in zip(("image_url", "video_url"), urls, strict=True)]
    assert with_parts({"type": "text", "text": "Look:"}, *media).media_urls == tuple(urls)
    assert with_parts({"type": "text", "text": urls[0]}).media_urls == ()


def test_prompts_with_the_same_images_begin_alike_and_those_with_others_do_not() -> None:
    long = {"type": "text", "text": "word " * 200}
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}}
    (first,), (same,), (unlike,) = (
        estimated(with_parts(part, long), 1, TextLength()) for part in (IMAGE, dict(IMAGE), other)
    )
    assert first.keys == same.keys
    assert not set(first.keys) & set(unlike.keys)


@pytest.mark.parametrize("part", [{"type": "image_url"}, {"type": "image_url", "image_url": "x"}, {"type": "smell"}])
def test_a_part_that_cannot_be_read_is_named(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as failure:
        with_parts({"type": "text", "text": "Look:"}, part)
    assert failure.value.param == "messages[0].content[1]"
    assert "image_url" in failure.value.hint


def test_tools_are_as_engines_pass_them_to_templates() -> None:
    tool = {"function": {"parameters": {"type": "object"}, "name": "f", "strict": True, "x": 1}, "type": "function"}
    short = {"type": "function", "function": {"name": "g"}, "cache_control": {}}
    chat = messages_of(tools=[tool, short])
    assert json.dumps(chat.tools) == json.dumps(
        [
            {
                "type": "function",
                "function": {"name": "f", "description": None, "parameters": {"type": "object"}, "strict": True},
            },
            {"type": "function", "function": {"name": "g", "description": None, "parameters": None}},
        ]
    )
    assert [messages_of(tools=[tool], tool_choice=choice).bars_tools for choice in (None, "auto", "none")] == [0, 0, 1]
    assert messages_of(tools=[]).tools is None


@pytest.mark.parametrize(
    ("fields", "forced", "one_call"),
    [
        ({}, set(), False),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, set(), True),
        ({"tool_choice": "required"}, {"f", "g"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, {"g"}, True),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, set(), True),
    ],
)
def test_tools_that_must_be_called_are_known(fields: dict[str, Any], forced: set[str], one_call: bool) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    (chat,) = chat_ask(a_chat(tools=tools, **fields)).inputs
    assert isinstance(chat, Chat)
    assert (chat.forced, chat.one_call) == (forced, one_call)


@pytest.mark.parametrize("function", [{"name": "h"}, {}, None])
def test_a_tool_that_is_not_there_cannot_be_chosen(function: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequest) as caught:
        chat_ask(a_chat(tools=tools, tool_choice={"type": "function", "function": function}))
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["priority", "session"])
def test_a_header_that_is_empty_is_a_header_that_is_absent(name: str) -> None:
    assert getattr(chat_ask(a_chat(), {f"x-pointsman-{name}": ""}), name) is None
    assert getattr(chat_ask(a_chat(), {}), name) is None
    assert getattr(chat_ask(a_chat(), {f"x-pointsman-{name}": "batch"}), name) == "batch"


def test_no_alternatives_need_no_logprobs() -> None:
    ask = chat_ask(a_chat(top_logprobs=0))
    assert (ask.sampling.top_logprobs, ask.needs) == (None, frozenset())


def test_sampling_takes_every_field() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": -0.3, "seed": 7, "stop": "end", "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 2,
        "logit_bias": {"5": -100}, "n": 3, "logprobs": True, "top_logprobs": 4, "max_tokens": 8,
        "max_completion_tokens": 9,
    }  # fmt: skip
    ask = chat_ask(a_chat(**fields))
    sampling = ask.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.3, -0.3)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (7, ("end",), (5,))
    assert (sampling.ignore_eos, sampling.min_new_tokens, sampling.logit_bias) == (True, 2, {5: -100})
    assert (sampling.choices, sampling.top_logprobs, ask.max_new_tokens) == (3, 4, 9)


def test_an_empty_nucleus_is_greedy() -> None:
    sampling = chat_ask(a_chat(top_p=0, temperature=1.5)).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


@pytest.mark.parametrize("wrong", ["-5", "1.5", "x" * 5000, "٣"])
def test_logit_biases_are_keyed_by_token_ids(wrong: str) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        chat_ask(a_chat(logit_bias={wrong: 1}))


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, set()),
        ({"n": 2}, {Capability.CHOICES}),
        ({"logprobs": True}, {Capability.LOGPROBS}),
        ({"logprobs": False, "n": 1, "response_format": {"type": "text"}}, set()),
        ({"response_format": {"type": "json_object"}}, {Capability.STRUCTURED_OUTPUT}),
        ({"structured_outputs": {"regex": "a"}}, {Capability.STRUCTURED_OUTPUT}),
        ({"structured_outputs": {}, "guided_json": None}, set()),
    ],
)
def test_a_chat_has_the_capabilities_that_its_backend_needs(fields: dict[str, Any], needs: set[Capability]) -> None:
    assert chat_ask(a_chat(**fields)).needs == needs


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({"prompt": "Hi"}, set()),
        ({"prompt": ["Hi", "Ho"]}, set()),
        ({"prompt": [1, 2]}, {Capability.TOKEN_IDS}),
        ({"prompt": ["Hi", [1, 2]]}, {Capability.TOKEN_IDS}),
        ({"prompt": "Hi", "logprobs": 0, "n": 3}, {Capability.LOGPROBS, Capability.CHOICES}),
        ({"prompt": "Hi", "guided_choice": ["a", "b"]}, {Capability.STRUCTURED_OUTPUT}),
    ],
)
def test_so_does_a_completion(fields: dict[str, Any], needs: set[Capability]) -> None:
    assert completion_ask({"model": "tiny", **fields}).needs == needs


RARE = {
    "suffix": ({"suffix": " and so on."}, {Capability.SUFFIX}),
    "echo": ({"echo": True, "logprobs": 1}, {Capability.LOGPROBS, Capability.PROMPT_LOGPROBS}),
}


@pytest.mark.parametrize("param", RARE)
async def test_rare_fields_of_completions_reach_backends_that_support_them_and_are_refused_by_name_elsewhere(
    param: str,
) -> None:
    fields, needs = RARE[param]
    body = {"model": "tiny", "prompt": "the quick", **fields}
    able = ScriptedBackend("able", speaks_tokens=False, scripts=[an_answer("the quick", " fox")])
    able.capabilities |= needs
    assert completion_ask(body).needs == needs
    async with a_router(able, ScriptedBackend("shard")) as router, a_client(router) as client:
        status, answer = await client.answer(COMPLETIONS, body)
        assert (status, answer["choices"][0]["text"]) == (200, "the quick fox"), "the backend's own echo, and no other"
    native = able.prompts[0].native
    assert native is not None
    assert native.raw == json.dumps(body).encode()
    async with a_router(ScriptedBackend("shard")) as router, a_client(router) as client:
        status, answer = await client.answer(COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "no backend of 'tiny' can " in answer["error"]["message"]
    assert answer["error"]["hint"]


def test_a_text_alone_is_echoed_by_the_router() -> None:
    ask = completion_ask({"model": "tiny", "prompt": "the quick", "echo": True})
    assert (ask.echo, ask.bodies[0]) == (True, {"model": "tiny", "prompt": "the quick"})


@pytest.mark.parametrize("role", ["ipython", "model", "documents", "observation", "developer"])
def test_roles_that_only_some_templates_know_are_passed_on(role: str) -> None:
    chat = messages_of({"role": role, "content": "x"})
    assert [message["role"] for message in chat.messages] == [role, "user"]


@pytest.mark.parametrize("role", ["", None, 5, "r" * 65])
def test_a_role_is_a_short_name(role: Any) -> None:
    with pytest.raises(InvalidRequest, match="role"):
        messages_of({"role": role, "content": "x"})
