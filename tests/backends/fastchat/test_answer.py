from __future__ import annotations

import json

import pytest

from backends.fastchat.answer import FastChatAnswer
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendRefused,
    ContextExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
)
from policies.nouns import Delta, Usage

# As a model worker of 0.2.36 sends it: NUL after each frame, all of the text in each, half a character as U+FFFD.
GOLDEN = (
    b'{"text": "The", "error_code": 0, "usage": {"prompt_tokens": 42, "completion_tokens": 1, "total_tokens": 43},'
    b' "finish_reason": null, "logprobs": null}\x00'
    b'{"text": "The h\\ufffd", "error_code": 0, "usage": {"prompt_tokens": 42, "completion_tokens": 2, "total_tokens":'
    b' 44}, "finish_reason": null, "logprobs": null}\x00'
    b'{"text": "The h\\u00e9", "error_code": 0, "usage": {"prompt_tokens": 42, "completion_tokens": 3, "total_tokens":'
    b' 45}, "finish_reason": null, "logprobs": null}\x00'
    b'{"text": "The h\\u00e9", "error_code": 0, "usage": {"prompt_tokens": 42, "completion_tokens": 4, "total_tokens":'
    b' 46}, "finish_reason": "stop", "logprobs": null}\x00'
)


def read(data: bytes, size: int = 1 << 20, prompt_tokens: int = 0) -> list[Delta]:
    answer = FastChatAnswer("b", prompt_tokens=prompt_tokens)
    deltas = [delta for at in range(0, len(data), size) for delta in answer.feed(data[at : at + size])]
    return deltas + list(answer.end())


def a_frame(**fields: object) -> bytes:
    return json.dumps({"text": "", "error_code": 0, **fields}).encode() + b"\0"


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_what_is_cumulative_becomes_pieces_and_half_a_character_waits(size: int) -> None:
    assert read(GOLDEN, size) == [
        Delta(text="The"),
        Delta(text=" h"),
        Delta(text="é"),
        Delta(finish_reason="stop"),
        Delta(usage=Usage(42, 4)),
    ]


def test_an_incomplete_character_is_sent_at_the_end() -> None:
    deltas = read(a_frame(text="a\ufffd") + a_frame(text="a\ufffd", finish_reason="length"), prompt_tokens=7)
    assert deltas == [
        Delta(text="a"),
        Delta(text="\ufffd", finish_reason="length"),
        Delta(usage=Usage(7, is_guess=True)),
    ]


def test_a_worker_that_names_no_reason_is_done_at_the_end_of_the_body_if_usage_came() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    assert read(a_frame(text="a", usage=usage)) == [
        Delta(text="a"), Delta(finish_reason="stop"), Delta(usage=Usage(2, 1)),
    ]  # fmt: skip
    with pytest.raises(BackendFailed, match="without a reason"):
        read(a_frame(text="a"))


def test_text_that_a_worker_takes_back_is_not_sent_twice() -> None:
    deltas = read(a_frame(text="abc") + a_frame(text="ab") + a_frame(text="abcd", finish_reason="stop"))
    assert "".join(delta.text for delta in deltas) == "abcd"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (40001, InvalidRequest),
        (40101, BackendRefused),
        (40301, BackendRefused),
        (40302, InvalidRequest),
        (40303, ContextExceeded),
        (42901, Overloaded),
        (42903, Overloaded),
        (50001, BackendErred),
        (50002, BackendErred),
        (50005, BackendFailed),
        (50006, BackendFailed),
    ],
)
def test_each_error_code_has_its_error(code: int, kind: type[ExpectedError]) -> None:
    with pytest.raises(ExpectedError, match="NETWORK ERROR") as failure:
        read(a_frame(text="**NETWORK ERROR DUE TO HIGH TRAFFIC.**", error_code=code))
    assert type(failure.value) is kind


def test_of_a_long_error_text_the_client_gets_2000_characters() -> None:
    with pytest.raises(InvalidRequest) as failure:
        read(a_frame(text="x" * 3000, error_code=40001))
    assert str(failure.value) == "x" * 2000


@pytest.mark.parametrize(
    "data", [b"{\0", b"[1]\0", b'{"text":"a"}\0', b"5\0", GOLDEN[:200], b"", a_frame(finish_reason="abort")]
)
def test_nonsense_and_an_early_end_are_failures(data: bytes) -> None:
    with pytest.raises(BackendFailed):
        read(data)


def test_nothing_is_heard_after_the_end() -> None:
    assert read(GOLDEN + b"{broken\0")[-1] == Delta(usage=Usage(42, 4))
