"""What is decoded at once has so few values that others need not wait long; more is read in turns, or refused."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http.frames import FrameDecoder
from backends.http.lenient_json import _in_turns, read_json
from backends.http.sse import SseBlocks, SseDecoder
from backends.nesting import FEW_BYTES, MOST_AT_ONCE, has_many_values
from backends.openai.answer import OpenAIAnswer, ReadWhole
from backends.openai.passed import Chunk, Ear, PassedWhole
from policies.errors import BackendErred
from policies.nouns import Request

UNITS = (b"[],", b'{"a":1},', b"1,", b'"",', b"{},", b"1e5,")
MANY = [b"[" + unit * (MOST_AT_ONCE + 9) + b"0]" for unit in UNITS]
FEW = [b'["' + b"x" * (2 * FEW_BYTES) + b'"]', b"[" + b"1," * 1000 + b"0]", b"[" * 1000]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, width=32) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@pytest.mark.parametrize("data", MANY)
def test_an_event_of_many_values_is_refused(data: bytes) -> None:
    for feed in (SseBlocks().feed, SseDecoder().feed, FrameDecoder().feed):
        with pytest.raises(BackendErred, match="values"):
            feed(b"data: " + data + b"\n\n")
    assert SseBlocks().plain(b"data: " + data + b"\n\n") is None


@pytest.mark.parametrize("line", [b"\r1", b"\n1", b"\r\ndata: 1", b"\n:", b"\rdata"])
def test_an_event_of_many_lines_is_refused_and_one_of_some_is_taken(line: bytes) -> None:
    beginning, end = b'data: {"a":"', b"\n\n"
    with pytest.raises(BackendErred, match="lines"):
        SseDecoder().feed(beginning + line * 280_000 + end)
    assert SseDecoder().feed(beginning + line * 1000 + end)[0].data.startswith(b'{"a":"')


@pytest.mark.parametrize("data", FEW)
def test_a_large_event_of_few_values_is_taken(data: bytes) -> None:
    (event,) = SseDecoder().feed(b"data: " + data + b"\n\n")
    assert event.data == data
    assert FrameDecoder().feed(data + b"\n") == [data]


@pytest.mark.parametrize("data", MANY)
def test_other_threads_run_while_many_values_are_read(data: bytes) -> None:
    assert has_many_values(data)
    steps, is_over = 0, threading.Event()

    def count() -> None:
        nonlocal steps
        while not is_over.wait(0.001):
            steps += 1

    other = threading.Thread(target=count)
    other.start()
    try:
        assert read_json(data) == msgspec.json.decode(data)
    finally:
        is_over.set()
        other.join()
    assert steps > 1


@given(VALUES)
def test_what_is_read_in_turns_is_what_is_read_at_once(value: Any) -> None:
    assert _in_turns(msgspec.json.encode(value), Any) == msgspec.json.decode(msgspec.json.encode(value))


@pytest.mark.parametrize(
    "data", [b"", b"[", b"[1,]", b"{1:2}", b'"', b"[" * 100_000, b"[" + b"9" * 5000 + b"]", b"[1]x"]
)
def test_what_is_no_json_is_refused_in_turns_too(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        _in_turns(data, Any)


def test_what_is_no_chunk_is_refused_in_turns_too() -> None:
    with pytest.raises(msgspec.ValidationError):
        _in_turns(b'{"choices":{}}', Chunk)


@pytest.mark.parametrize("shown_model", [None, "shown"])
def test_an_answer_with_millions_of_candidates_is_passed_and_read(shown_model: str | None) -> None:
    each = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -2.0}] * 20}
    choice = {"index": 0, "message": {"content": "aa"}, "finish_reason": "stop", "logprobs": {"content": [each] * 8000}}
    usage = {"prompt_tokens": 3, "completion_tokens": 8000}
    whole = msgspec.json.encode({"model": "m", "choices": [choice], "usage": usage})
    assert has_many_values(whole)
    (delta,) = PassedWhole(Ear("b", 3, shown_model=shown_model)).read(whole)
    assert delta.usage is not None
    assert (delta.usage.completion_tokens, delta.finish_reason) == (8000, "stop")
    asked = Request("r", "t", "m", "d", 3, 16, "c")
    first, last = ReadWhole(OpenAIAnswer("b", asked, is_streamed=False)).read(whole)
    assert (first.text, len(first.logprobs), len(first.logprobs[0].top)) == ("aa", 8000, 20)
    assert last.usage == delta.usage
