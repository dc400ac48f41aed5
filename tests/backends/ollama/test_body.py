from __future__ import annotations

from typing import Any

import pytest

from backends.ollama.body import chat_body, generate_body, messages_of
from policies.errors import InvalidRequest
from policies.nouns import Sampling
from tests.backends.parts import a_request

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PLAIN = {"num_predict": 100, "temperature": 1.0, "top_p": 1.0}
NOT_CUT = {"stream": True, "truncate": False, "shift": False}


def test_a_plain_chat_asks_for_openais_defaults_and_for_nothing_to_be_cut() -> None:
    assert chat_body(a_request(), {**CHAT, "user": "u", "stream": False, "n": 1, "logprobs": False}) == {
        "messages": [{"role": "user", "content": "Hello"}],
        "options": PLAIN,
        **NOT_CUT,
    }


def test_what_was_asked_for_is_spelt_in_ollamas_words() -> None:
    sampling = Sampling(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.4, seed=7, stop=("x",), top_logprobs=2,
    )  # fmt: skip
    body = {**CHAT, "tools": [TOOL], "tool_choice": "auto", "options": {"mirostat": 1, "num_ctx": 9, "num_gpu": 0}}
    sent = chat_body(a_request(sampling=sampling, max_new_tokens=9), body)
    assert sent["options"] == {
        "mirostat": 1,
        "num_predict": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "seed": 7,
        "stop": ["x"],
    }
    assert (sent["tools"], sent["logprobs"], sent["top_logprobs"]) == ([TOOL], True, 2)


def test_clients_cannot_set_what_the_pool_decides() -> None:
    forged = {"keep_alive": -1, "truncate": True, "shift": True, "num_ctx": 9, "template": "x"}
    assert chat_body(a_request(), {**CHAT, **forged}) == chat_body(a_request(), CHAT)


@pytest.mark.parametrize(
    ("fields", "think"),
    [
        ({}, None),
        ({"think": False}, False),
        ({"think": "high"}, "high"),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning": {"effort": "xhigh"}}, "max"),
    ],
)
def test_thinking_may_be_asked_for_in_either_dialect(fields: dict[str, Any], think: object) -> None:
    assert chat_body(a_request(), {**CHAT, **fields}).get("think") == think


@pytest.mark.parametrize(
    ("shape", "sent"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}, {"type": "object"}),
    ],
)
def test_a_shape_is_spelt_as_ollama_does(shape: dict[str, Any], sent: object) -> None:
    assert chat_body(a_request(), {**CHAT, "response_format": shape}).get("format") == sent


def test_a_text_is_continued_as_it_is_unless_the_template_must_place_something() -> None:
    assert generate_body(a_request(), {"prompt": "Hi"}, is_raw=True) == {
        "prompt": "Hi", "raw": True, "options": PLAIN, **NOT_CUT,
    }  # fmt: skip
    assert "raw" not in generate_body(a_request(), {"prompt": "Hi"}, is_raw=False)
    assert "raw" not in generate_body(a_request(), {"prompt": "Hi", "suffix": "!"}, is_raw=True)
    assert "raw" not in generate_body(a_request(), {"prompt": "Hi", "system": "Be kind."}, is_raw=True)


def test_messages_keep_all_their_fields() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert messages_of(
        [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Look:"}, image, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm"},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
            {"role": "tool", "content": "4", "name": "g"},
        ]
    ) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Look:\nwhat?", "images": ["AAAA"]},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Hm",
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "3", "tool_name": "f", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "tool_name": "g"},
    ]


def a_message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"guided_json": {}, "mirostat_mode": 2}, "mirostat_mode"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (a_message(name="ada"), "messages[0].name"),
        (a_message(audio={"id": "x"}), "messages[0].audio"),
        (a_message(content=[{"type": "input_audio"}]), "messages[0].content"),
        (a_message(content=[{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]), "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_what_ollama_would_skip_in_silence_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        chat_body(a_request(), {**CHAT, **fields})
    assert failure.value.param == param


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(choices=2), "n"),
        (Sampling(logit_bias={1: 1.0}), "logit_bias"),
        (Sampling(min_new_tokens=2), "min_tokens"),
        (Sampling(stop_token_ids=(1,)), "stop_token_ids"),
        (Sampling(ignore_eos=True), "ignore_eos"),
    ],
)
def test_sampling_that_ollama_does_not_know_is_refused_by_name(sampling: Sampling, param: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        chat_body(a_request(sampling=sampling), CHAT)
    assert failure.value.param == param


@pytest.mark.parametrize("prompt", [[1, 2], ""])
def test_a_text_prompt_is_text_and_not_empty(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as failure:
        generate_body(a_request(), {"prompt": prompt}, is_raw=True)
    assert failure.value.param == "prompt"
