from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from backends.openai.responses import PassedResponse, PassedWholeResponse
from policies.errors import BackendErred, BackendFailed, ContextExceeded, ExpectedError
from policies.nouns import Delta, Usage

USAGE = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2, "vendor": 1}
RESPONSE: dict[str, Any] = {"id": "r", "model": "m", "status": "completed", "output": [], "usage": USAGE}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


BEGIN = event("response.created", response={**RESPONSE, "status": "in_progress", "usage": None})
PIECE = event("response.output_text.delta", delta="Hi", item_id="msg")
END = event("response.completed", response=RESPONSE)


def heard(answer: PassedResponse, pieces: list[bytes]) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in answer.feed(piece)]
    return [*deltas, *answer.end()]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_streamed_response_goes_through_byte_by_byte_and_its_usage_is_heard(size: int) -> None:
    whole = BEGIN + PIECE + END
    cuts = [*range(0, len(whole), size), len(whole)]
    deltas = heard(PassedResponse("up"), [whole[start:end] for start, end in pairwise(cuts)])
    assert b"".join(delta.raw or b"" for delta in deltas) == whole
    assert sum(delta.tokens for delta in deltas) == 1
    assert (deltas[-1].usage, deltas[-1].finish_reason) == (Usage(7, 2, 4), "stop")


def test_nothing_goes_out_before_the_first_piece() -> None:
    answer = PassedResponse("up")
    assert list(answer.feed(BEGIN)) == []
    assert [delta.raw for delta in answer.feed(PIECE)] == [BEGIN + PIECE]


def test_the_model_has_the_name_that_the_client_knows_in_every_event_that_names_it() -> None:
    deltas = heard(PassedResponse("up", shown_model="mine"), [BEGIN + PIECE + END])
    passed = b"".join(delta.raw or b"" for delta in deltas)
    assert passed == (BEGIN + PIECE + END).replace(b'"model": "m"', b'"model": "mine"')


@pytest.mark.parametrize(
    ("status", "output", "finish"),
    [
        ("completed", [{"type": "message"}], "stop"),
        ("incomplete", [{"type": "message"}], "length"),
        ("completed", [{"type": "reasoning"}, {"type": "function_call"}], "tool_calls"),
    ],
)
def test_a_whole_response_goes_through_whole(status: str, output: list[Any], finish: str) -> None:
    body = json.dumps({**RESPONSE, "status": status, "output": output}).encode()
    (answer,) = PassedWholeResponse("up").read(body)
    assert answer == Delta(body=body, finish_reason=finish, usage=Usage(7, 2, 4), is_whole=True, tokens=2)
    renamed = PassedWholeResponse("up", shown_model="mine").read(body)[0].body
    assert renamed == body.replace(b'"model": "m"', b'"model": "mine"')


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (event("error", message="out of memory"), BackendErred, "out of memory"),
        (event("response.failed", response={"error": {"message": "gone"}}), BackendErred, "gone"),
        (
            event("error", code="context_length_exceeded", message="too long"),
            ContextExceeded,
            "too long",
        ),
        (event("response.completed", response={"status": "completed"}), BackendErred, "nonsense"),
        (b"data: {broken\n\n", BackendErred, "nonsense"),
        (b"data: [1]\n\n", BackendErred, "nonsense"),
    ],
)
def test_an_error_in_the_stream_is_raised_and_never_passed_on(
    data: bytes, kind: type[ExpectedError], message: str
) -> None:
    with pytest.raises(ExpectedError, match=message) as failure:
        heard(PassedResponse("up"), [BEGIN, data])
    assert type(failure.value) is kind


def test_a_stream_that_ends_too_early_has_failed() -> None:
    with pytest.raises(BackendFailed, match=r"without response\.completed"):
        heard(PassedResponse("up"), [BEGIN, PIECE])


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", json.dumps({**RESPONSE, "status": "unheard of"}).encode()],
)
def test_what_is_no_response_is_nonsense(body: bytes) -> None:
    with pytest.raises(BackendFailed, match="nonsense"):
        PassedWholeResponse("up").read(body)


def test_a_whole_response_that_failed_has_failed() -> None:
    body = json.dumps({**RESPONSE, "status": "failed", "error": {"message": "gone"}}).encode()
    with pytest.raises(BackendFailed, match="gone"):
        PassedWholeResponse("up").read(body)
