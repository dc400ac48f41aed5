from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.openai.answer import OpenAIAnswer
from backends.openai.calls import CallPieces, call_ids_in, drawn_id
from backends.openai.gathered import merge_message
from tests.backends.parts import a_request

Piece = dict[str, Any]
F = {"name": "f"}


def gathered(pieces: Sequence[Mapping[str, Any]], taken: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of each call that a client puts together."""
    numbers = count(1)
    calls = CallPieces(taken, draw=lambda: f"made{next(numbers)}")
    message: dict[str, Any] = {}
    for piece in pieces:
        merge_message(message, {"tool_calls": calls.read([piece])})
    assert [call["index"] for call in message["tool_calls"]] == list(range(len(message["tool_calls"])))
    assert all(call["type"] == "function" for call in message["tool_calls"])
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def begun(name: str, arguments: Any = "", **more: Any) -> Piece:
    return {**more, "function": {"name": name, "arguments": arguments}}


def more_of(arguments: str, **more: Any) -> Piece:
    return {**more, "function": {"arguments": arguments}}


@pytest.mark.parametrize(
    ("pieces", "calls"),
    [
        pytest.param(
            [begun("f", "{}", index=0, id="a"), begun("g", "{}", index=0, id="b")],
            [("a", "f", "{}"), ("b", "g", "{}")],
            id="all have index 0, and another id",
        ),
        pytest.param(
            [
                begun("f", index=0, id="a"),
                begun("f", index=0, id="b"),
                more_of("{}", index=0, id="a"),
                more_of("[]", index=0, id="b"),
            ],
            [("a", "f", "{}"), ("b", "f", "[]")],
            id="all have index 0, and fragments alternate",
        ),
        pytest.param(
            [
                {"index": 0, "id": "a"},
                {"index": 0, **begun("f", "{}")},
                {"index": 0, "id": "b"},
                {"index": 0, **begun("g", "{}")},
            ],
            [("a", "f", "{}"), ("b", "g", "{}")],
            id="an id comes before its name",
        ),
        pytest.param(
            [begun("f"), more_of('{"a":'), more_of("1}"), begun("f", "{}")],
            [("made1", "f", '{"a":1}'), ("made2", "f", "{}")],
            id="neither index nor id",
        ),
        pytest.param(
            [begun("f", "{", id="a"), more_of("}", id="a"), begun("f", "{}", id="b")],
            [("a", "f", "{}"), ("b", "f", "{}")],
            id="ids without an index",
        ),
        pytest.param(
            [begun("f", index=0), begun("g", index=1), more_of("{}", index=1), more_of("[]", index=0)],
            [("made1", "f", "[]"), ("made2", "g", "{}")],
            id="no ids, and fragments alternate",
        ),
        pytest.param(
            [begun("f", {"a": [1]}, index=0, id="a")], [("a", "f", '{"a":[1]}')], id="arguments are an object"
        ),
        pytest.param(
            [begun("f", '{"a":', index=0, id="a"), begun("f", "1}", index=0, id="a")],
            [("a", "f", '{"a":1}')],
            id="name and id in each fragment",
        ),
        pytest.param(
            [begun("f", "", index=0, id="x1"), more_of('{"a":', index=0, id="x2"), more_of("1}", index=0, id="x3")],
            [("x1", "f", '{"a":1}')],
            id="an id is drawn for each fragment",
        ),
        pytest.param(
            [begun("f", "{}", index=0), begun("f", '{"a":1}', index=0)],
            [("made1", "f", "{}"), ("made2", "f", '{"a":1}')],
            id="whole calls with index 0 and no id",
        ),
        pytest.param(
            [begun("f", "{}", index=7, id="a"), begun("g", "{}", index=3, id="b")],
            [("a", "f", "{}"), ("b", "g", "{}")],
            id="indices are not 0, 1, 2",
        ),
        pytest.param(
            [begun("f", "{}", index=0, id="a"), begun("g", "{}", index=1, id="a")],
            [("a", "f", "{}"), ("made1", "g", "{}")],
            id="two calls have one id",
        ),
        pytest.param(
            [
                {"index": 0, "id": None, "type": None, "function": {"name": "f", "arguments": None}},
                {"index": 0, "id": "", "function": {"name": None, "arguments": "{}"}},
            ],
            [("made1", "f", "{}")],
            id="null and empty members",
        ),
    ],
)
def test_a_client_gets_whole_calls_however_a_server_writes_them(
    pieces: list[Piece], calls: list[tuple[str, str, str]]
) -> None:
    assert gathered(pieces) == calls


def test_no_call_has_an_id_of_the_conversation() -> None:
    body = {"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [{"id": "call_0"}, {"id": None}]}]}
    assert gathered([begun("f", "{}", index=0, id="call_0")], tuple(call_ids_in(body))) == [("made1", "f", "{}")]
    assert len({drawn_id() for _ in range(1000)}) == 1000


def test_one_call_that_is_no_list_is_read() -> None:
    assert [call["id"] for call in CallPieces().read(begun("f", index=0, id="a"))] == ["a"]


def _apart(text: str, pieces: int) -> list[str]:
    at = [len(text) * n // pieces for n in range(pieces + 1)]
    return [text[a:b] for a, b in pairwise(at)]


def _indexed(at: int, id_: str, name: str, fragments: Sequence[str]) -> Iterator[Piece]:
    yield begun(name, index=at)
    for fragment in fragments:
        yield more_of(fragment, index=at)


def _all_zero(at: int, id_: str, name: str, fragments: Sequence[str]) -> Iterator[Piece]:
    yield begun(name, index=0, id=id_)
    for fragment in fragments:
        yield more_of(fragment, index=0, id=id_)


def _by_id(at: int, id_: str, name: str, fragments: Sequence[str]) -> Iterator[Piece]:
    yield begun(name, id=id_)
    for fragment in fragments:
        yield more_of(fragment, id=id_)


@given(
    st.sampled_from([_indexed, _all_zero, _by_id]),
    st.lists(st.tuples(st.sampled_from("fgh"), st.dictionaries(st.text(), st.text()), st.integers(1, 4)), min_size=1),
    st.randoms(),
)
def test_calls_stay_whole_in_whatever_order_their_fragments_come(
    style: Callable[..., Iterator[Piece]], asked: list[tuple[str, dict[str, str], int]], random: Any
) -> None:
    streams = [
        list(style(at, f"id{at}", name, _apart(json.dumps(arguments), pieces)))
        for at, (name, arguments, pieces) in enumerate(asked)
    ]
    mixed = [stream.pop(0) for stream in streams]
    while any(streams):
        mixed.append(random.choice([stream for stream in streams if stream]).pop(0))
    found = gathered(mixed)
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == [(name, args) for name, args, _ in asked]
    assert len({id_ for id_, *_ in found}) == len(asked)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_answer_has_whole_calls(is_streamed: bool) -> None:
    whole = [begun("f", {"a": 1}), begun("g", {})]
    if is_streamed:
        chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in whole]
        data = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    else:
        data = json.dumps({"choices": [{"message": {"tool_calls": whole}, "finish_reason": "tool_calls"}]}).encode()
    answer = OpenAIAnswer("b", a_request(), is_streamed=is_streamed)
    message: dict[str, Any] = {}
    for delta in (*answer.feed(data), *answer.end()):
        merge_message(message, delta.message or {})
    found = [(call["index"], call["function"]) for call in message["tool_calls"]]
    assert found == [(0, {"name": "f", "arguments": '{"a":1}'}), (1, {"name": "g", "arguments": "{}"})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
