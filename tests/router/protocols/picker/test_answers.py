"""Answers that pass by, read for what they cost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.messages.answer import AnthropicAnswer
from backends.openai.answer import OpenAIAnswer
from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Delta, Request, Usage
from router.protocols.picker.answers import Collected, ResponseEvents, UsageAlone, reader_of

REQUEST = Request("r", "acme", "m", "acme", prompt_tokens=5, max_new_tokens=9, service_class="chat")
USAGE = {"input_tokens": 36, "input_tokens_details": {"cached_tokens": 30}, "output_tokens": 7, "total_tokens": 43}


def events(*payloads: dict[str, Any]) -> bytes:
    return b"".join(f"event: {payload['type']}\ndata: {json.dumps(payload)}\n\n".encode() for payload in payloads)


STREAM = events(
    {"type": "response.created", "response": {"id": "resp_1"}},
    {"type": "response.output_text.delta", "delta": "Hi"},
    {"type": "response.function_call_arguments.delta", "delta": "{}"},
    {"type": "response.output_text.done", "text": "Hi"},
    {"type": "response.completed", "response": {"usage": USAGE}},
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_streamed_responses_are_counted_however_they_are_cut(cuts: list[int]) -> None:
    answer, at = ResponseEvents("b0"), [0, *sorted(cuts), len(STREAM)]
    heard = [delta for a, b in pairwise(at) for delta in answer.feed(STREAM[a:b])]
    assert heard == [Delta(text="Hi"), Delta(text="{}"), Delta(finish_reason="stop", usage=Usage(36, 7, 30))]
    assert list(answer.end()) == []


def test_responses_that_are_cut_off_by_length_say_so() -> None:
    last = events({"type": "response.incomplete", "response": {"usage": USAGE}})
    assert [delta.finish_reason for delta in ResponseEvents("b0").feed(last)] == ["length"]


@pytest.mark.parametrize(
    "payload",
    [
        {"type": "error", "message": "no", "code": "server_error"},
        {"type": "response.failed", "response": {"error": {"message": "no", "code": "server_error"}}},
        {"type": "response.completed"},
    ],
)
def test_responses_that_fail_are_failures(payload: dict[str, Any]) -> None:
    with pytest.raises(ExpectedError):
        list(ResponseEvents("b0").feed(events(payload)))


def test_responses_without_an_end_are_failures() -> None:
    with pytest.raises(BackendFailed, match=r"without response\.completed"):
        list(ResponseEvents("b0").end())


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        (USAGE, Usage(36, 7, 30)),
        ({"input_tokens": 6, "cache_read_input_tokens": 30, "output_tokens": 7}, Usage(36, 7, 30)),
        (
            {"input_tokens": 6, "cache_creation_input_tokens": 4, "output_tokens": 7},
            Usage(10, 7, 0, cache_write_tokens=4),
        ),
    ],
)
def test_a_whole_answer_has_usage_as_in_responses_or_messages(usage: dict[str, Any], read: Usage) -> None:
    answer = Collected("b0", UsageAlone("b0"))
    raw = json.dumps({"usage": usage}).encode()
    assert not [*answer.feed(raw[:9]), *answer.feed(raw[9:])]
    assert [delta.usage for delta in answer.end()] == [read]
    assert answer.is_over


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"usage": 3}', b"\xff"])
def test_a_whole_answer_that_is_none_is_a_failure(raw: bytes) -> None:
    with pytest.raises(BackendFailed, match="answered nonsense"):
        UsageAlone("b0").read(raw)


def test_a_whole_answer_is_bounded() -> None:
    class Short(UsageAlone):
        limit_bytes = 4

    with pytest.raises(BackendFailed, match="more than 4 bytes"):
        Collected("b0", Short("b0")).feed(b"12345")


@pytest.mark.parametrize(
    ("path", "is_streamed", "kind"),
    [
        ("/v1/chat/completions", True, OpenAIAnswer),
        ("/v1/completions", False, Collected),
        ("/v1/embeddings", False, Collected),
        ("/v1/messages", True, AnthropicAnswer),
        ("/v1/messages", False, Collected),
        ("/v1/responses", True, ResponseEvents),
        ("/v1/responses", False, Collected),
    ],
)
def test_each_endpoint_has_its_reader(path: str, is_streamed: bool, kind: type) -> None:
    assert isinstance(reader_of(path, "b0", REQUEST, is_streamed=is_streamed), kind)


def test_an_embedding_is_read_as_a_backend_reads_it() -> None:
    reader = reader_of("/v1/embeddings", "b0", REQUEST, is_streamed=False)
    raw = b'{"data":[],"usage":{"prompt_tokens":3}}'
    assert [*reader.feed(raw), *reader.end()] == [Delta(body=raw, usage=Usage(3))]
