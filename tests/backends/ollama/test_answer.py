from __future__ import annotations

import json
from typing import Any

import pytest

from backends.ollama.answer import OllamaAnswer, error_of_ollama
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendLacks,
    ContextExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
)
from policies.nouns import Delta, TokenLogprob, Usage

# As docs/api.md shows a chat: lines of JSON, the last with the counts.
CHAT = (
    b'{"model":"llama3.2","created_at":"2023-08-04T08:52:19.385406455-07:00","message":{"role":"assistant","content":'
    b'"The"},"done":false}\n'
    b'{"model":"llama3.2","created_at":"2023-08-04T08:52:19.385406455-07:00","message":{"role":"assistant","content":'
    b'" h\xc3\xa9"},"done":false}\n'
    b'{"model":"llama3.2","created_at":"2023-08-04T19:22:45.499127Z","message":{"role":"assistant","content":""},'
    b'"done":true,"done_reason":"stop","total_duration":4883583458,"load_duration":1334875,"prompt_eval_count":26,'
    b'"prompt_eval_duration":342546000,"eval_count":282,"eval_duration":4535599000}\n'
)
TEXT = (
    b'{"model":"m","created_at":"t","response":"The","done":false}\n'
    b'{"model":"m","created_at":"t","response":"","done":true,"done_reason":"length","context":[1,2,3],'
    b'"prompt_eval_count":26,"eval_count":1}'
)


def read(data: bytes, size: int = 1 << 20, **parts: Any) -> list[Delta]:
    answer = OllamaAnswer("b", **parts)
    deltas = [delta for at in range(0, len(data), size) for delta in answer.feed(data[at : at + size])]
    return deltas + list(answer.end())


def a_line(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def the_end(**fields: object) -> bytes:
    return a_line(message={"role": "assistant", "content": ""}, done=True, **{"done_reason": "stop", **fields})


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_lines_become_deltas_however_they_are_cut(size: int) -> None:
    expected = [Delta(text="The"), Delta(text=" hé"), Delta(finish_reason="stop"), Delta(usage=Usage(26, 282))]
    assert read(CHAT, size) == expected


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_text_is_read_to_its_end_though_no_newline_ends_it(size: int) -> None:
    assert read(TEXT, size) == [Delta(text="The"), Delta(finish_reason="length"), Delta(usage=Usage(26, 1))]


@pytest.mark.parametrize("apart", [True, False])
def test_a_request_for_one_call_at_a_time_gets_only_the_first(apart: bool) -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in "fgh"]
    lines = [[call] for call in calls] if apart else [calls]
    stream = (a_line(message={"role": "assistant", "content": "", "tool_calls": some}, done=False) for some in lines)
    first, *rest = read(b"".join(stream) + the_end(), one_call=True)
    assert first.message is not None
    assert [call["function"]["name"] for call in first.message["tool_calls"]] == ["f"]
    assert rest == [Delta(finish_reason="tool_calls"), Delta(usage=Usage(is_guess=True))]


def test_thinking_and_calls_come_beside_the_text_as_openais_clients_read_them() -> None:
    calls = [{"id": "a", "function": {"index": 0, "name": "f", "arguments": {"a": [1]}}}]
    more = [{"id": "x", "function": {"index": 0, "name": "g", "arguments": {}}}]
    data = (
        a_line(message={"role": "assistant", "content": "", "thinking": "Hm"}, done=False)
        + a_line(message={"role": "assistant", "content": "", "tool_calls": calls}, done=False)
        + a_line(message={"role": "assistant", "content": "", "tool_calls": more}, done=False)
        + the_end()
    )
    first, second, third, last, _ = read(data)
    assert first.message == {"reasoning": "Hm"}
    assert second.message == {
        "tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":[1]}'}}]
    }
    assert third.message is not None
    assert [(call["index"], call["id"]) for call in third.message["tool_calls"]] == [(1, "x")]
    assert last.finish_reason == "tool_calls"


def test_log_probabilities_have_texts_and_no_ids() -> None:
    token = {"token": "a", "logprob": -0.5, "bytes": [97]}
    data = a_line(message={"content": "a"}, logprobs=[{**token, "top_logprobs": [token]}], done=False) + the_end()
    assert read(data)[0].logprobs == (TokenLogprob(0, "a", -0.5, (TokenLogprob(0, "a", -0.5),)),)


@pytest.mark.parametrize(
    ("reported", "counted", "usage"),
    [
        (26, 26, Usage(26, 0)),
        # a template adds a few
        (20, 26, Usage(20, 0)),
        # versions that leave out what was cached tell few, or nothing at all
        (3, 26, Usage(26, 0, 23)),
        (None, 26, Usage(26, 0, 26)),
        # what was only estimated says nothing of the cache
        (3, None, Usage(3, 0)),
        (None, None, Usage(30, 0, is_guess=True)),
    ],
)
def test_a_count_far_below_the_prompts_own_is_a_hint_of_a_cache_hit(
    reported: int | None, counted: int | None, usage: Usage
) -> None:
    data = the_end(**({} if reported is None else {"prompt_eval_count": reported}))
    assert read(data, prompt_tokens=30, counted=counted)[-1].usage == usage


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (
            400,
            "request (9001 tokens) exceeds the available context size (1024 tokens), try increasing it",
            ContextExceeded,
        ),
        (400, "the prompt is longer than the context length currently available to the model", ContextExceeded),
        (400, "top_logprobs must be between 0 and 20", InvalidRequest),
        (400, '"m" does not support thinking', InvalidRequest),
        (404, "model 'x' not found", BackendLacks),
        (403, "unauthorized", BackendLacks),
        (500, "llama runner process has terminated", BackendErred),
        (503, "server busy, please try again.  maximum pending requests exceeded", Overloaded),
        (503, "account unavailable", BackendFailed),
    ],
)
def test_each_status_has_its_error(status: int, message: str, kind: type[ExpectedError]) -> None:
    nested = json.dumps({"error": {"code": status, "message": message}})
    for body in (message, nested):
        error = error_of_ollama("b", status, json.dumps({"error": body}).encode(), {})
        assert type(error) is kind
        assert message in error.message
        assert "{" not in error.message


@pytest.mark.parametrize("data", [b"{\n", b"[1]\n", b'{"done":false}\n', b"5\n", CHAT[:120], b"", b"\xff\n"])
def test_nonsense_and_an_early_end_are_failures(data: bytes) -> None:
    with pytest.raises(BackendFailed):
        read(data)


def test_an_error_after_the_first_line_breaks_the_answer_off() -> None:
    with pytest.raises(BackendFailed, match="CUDA"):
        read(CHAT.splitlines(keepends=True)[0] + a_line(error="CUDA error"))


def test_nothing_is_heard_after_the_end() -> None:
    assert read(CHAT + b"{broken\n")[-1] == Delta(usage=Usage(26, 282))


def test_calls_without_ids_get_ids_that_no_turn_repeats() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    data = a_line(message={"role": "assistant", "content": "", "tool_calls": [call, call]}, done=False) + the_end()
    ids = [one["id"] for _ in range(3) for one in (read(data)[0].message or {})["tool_calls"]]
    assert len(set(ids)) == 6
