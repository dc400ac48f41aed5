from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backends.http.exchange import Answer
from backends.http.passed import MOST_HELD_BYTES
from backends.openai import passed as answers
from backends.openai.answer import OpenAIAnswer
from backends.openai.passed import Ear, PassedStream, PassedWhole
from policies.errors import BackendErred, BackendFailed, ExpectedError, InvalidRequest
from policies.nouns import Delta, Usage
from tests.backends.parts import a_request
from tests.backends.upstream import DONE, a_chunk, event, used

ROLE = b'data: {"id": "x",  "choices":[{"index":0,"delta":{"role":"assistant","content":""}}], "vendor":1}\n\n'
PIECE = (
    b'data: {"choices":[{"delta":{"content":"Gr\\u00fc\xc3\x9fe"},"index":0,"finish_reason":null}],"usage":null}\n\n'
)
CALL = b'event: message\r\ndata: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\r\n\r\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop","stop_reason":7}]}\n\n'
COMMENT = b": working\n\n"
STREAM = (ROLE, COMMENT, PIECE, PIECE, CALL, COMMENT, END, used(5, 3, cached=2), DONE)


def an_ear(choices: int = 1, **fields: Any) -> Ear:
    return Ear("up", 9, choices, **fields)


def a_stream(shown_model: str | None = None, *, shows_usage: bool = False, choices: int = 1) -> PassedStream:
    return PassedStream(an_ear(choices, shown_model=shown_model), shows_usage=shows_usage)


def heard(answer: Answer, pieces: Iterable[bytes]) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in answer.feed(piece)]
    return [*deltas, *answer.end()]


def raw_of(deltas: Sequence[Delta]) -> bytes:
    return b"".join(delta.raw or b"" for delta in deltas)


def cut(whole: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({0, len(whole), *places})
    return [whole[start:end] for start, end in pairwise(ends)]


def test_every_byte_goes_through_in_its_order() -> None:
    assert raw_of(heard(a_stream(shows_usage=True), STREAM)) == b"".join(STREAM)


@pytest.mark.parametrize("member", ["pieces", "ends", "vendor"])
def test_members_of_a_server_are_none_of_its_business_whatever_they_are_called(member: str) -> None:
    piece = PIECE.replace(b"{", b'{"%b":["a",{}],' % member.encode(), 1)
    deltas = heard(a_stream(shows_usage=True), (piece, END, DONE))
    assert raw_of(deltas) == piece + END + DONE
    assert sum(delta.tokens for delta in deltas) == 1


@given(st.lists(st.integers(0, len(b"".join(STREAM)))), st.booleans())
def test_however_a_stream_is_cut_bytes_and_accounting_stay_the_same(cuts: list[int], shows_usage: bool) -> None:
    deltas = heard(a_stream(shows_usage=shows_usage), cut(b"".join(STREAM), cuts))
    shown = [block for block in STREAM if shows_usage or b'"prompt_tokens"' not in block]
    assert raw_of(deltas) == b"".join(shown)
    assert sum(delta.tokens for delta in deltas) == 3
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert [delta.usage for delta in deltas if delta.usage] == [Usage(5, 3, 2)]
    assert deltas[-1].usage is not None


CHOICES = st.fixed_dictionaries(
    {"index": st.integers(0, 2), "finish_reason": st.sampled_from([None, None, "stop", "length", "eos_token", ""])},
    optional={
        "delta": st.dictionaries(
            st.sampled_from(["role", "content", "reasoning_content", "refusal"]), st.none() | st.sampled_from(["", "a"])
        ),
        "text": st.sampled_from(["", "a"]),
    },
)
CHUNKS = st.fixed_dictionaries(
    {"choices": st.lists(CHOICES, max_size=3)},
    optional={
        "usage": st.none() | st.fixed_dictionaries({"prompt_tokens": st.integers(0, 9)}),
        "vendor": st.just({"usage": 1}),
    },
)


@given(st.lists(CHUNKS, max_size=6))
def test_what_is_accounted_is_what_is_when_an_answer_is_taken_apart(chunks: list[dict[str, Any]]) -> None:
    pieces = [*map(event, chunks), DONE]
    passed = heard(a_stream(shows_usage=True, choices=8), pieces)
    apart = heard(OpenAIAnswer("up", a_request(prompt_tokens=9), is_streamed=True, most_choices=8), pieces)
    assert passed[-1].usage == apart[-1].usage
    assert [(delta.choice, delta.finish_reason) for delta in passed if delta.finish_reason] == [
        (delta.choice, delta.finish_reason) for delta in apart if delta.finish_reason
    ]
    assert raw_of(passed) == b"".join(pieces)
    assert "".join(delta.text for delta in passed if delta.message is None) == "".join(
        delta.text for delta in apart
    ) or any(delta.message is not None for delta in passed)


ODDITIES: list[dict[str, Any]] = [
    *({"usage": usage} for usage in (None, {}, {"prompt_tokens": 3}, {"prompt_tokens": -1}, "a")),
    *({"object": name} for name in ("chat.completion.chunk", "text_completion", "error", "vendor", 7)),
    *({"error": error} for error in (None, "", {"message": "broken", "code": 400})),
    *({"choices": choices} for choices in (None, [], [{}], [{"index": 1, "text": "a"}], [{"text": "a"}] * 2)),
    *({"choices": [{"delta": {name: value}}]} for name in ("content", "role", "tool_calls") for value in (None, "", 7)),
    *({"choices": [{"delta": {"content": "a", "reasoning": value, "vendor": None}}]} for value in (None, "b")),
    *({"choices": [{"delta": {"content": "a"}, **more}]} for more in ({"text": ""}, {"text": "b"}, {"text": None})),
    *({"choices": [{"delta": {"content": "a"}, "finish_reason": reason}]} for reason in ("", "stop", "abort")),
    {"choices": [{"message": {"content": "a"}}]},
]
"""Members of a chunk that are no plain piece of text, or nearly none."""


def outcome(stream: PassedStream, pieces: Iterable[bytes]) -> tuple[object, ...]:
    """What came of `pieces`, whatever Deltas they came in: bytes, text (None: more than that), tokens, ends, usage."""
    deltas: list[Delta] = []
    failure = None
    try:
        for piece in pieces:
            deltas.extend(stream.feed(piece))
        deltas.extend(stream.end())
    except ExpectedError as error:
        failure = type(error), str(error)
    text = None if any(delta.message is not None for delta in deltas) else "".join(delta.text for delta in deltas)
    ends = [(delta.choice, delta.finish_reason) for delta in deltas if delta.finish_reason]
    usages = [delta.usage for delta in deltas if delta.usage]
    return raw_of(deltas), text, sum(delta.tokens for delta in deltas), ends, usages, failure


@given(st.lists(st.sampled_from([{}, {}, *ODDITIES]), max_size=8), st.booleans())
def test_a_plain_piece_of_text_is_read_in_one_step_as_it_is_read_by_parts(
    oddities: list[dict[str, Any]], shows_usage: bool
) -> None:
    plain = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "a"}}]}
    pieces = [*(event(plain | oddity) for oddity in oddities), DONE]
    # a piece that comes cut is never read in one step
    halves = [half for piece in pieces for half in (piece[:9], piece[9:])]
    assert outcome(a_stream(shows_usage=shows_usage), pieces) == outcome(a_stream(shows_usage=shows_usage), halves)
    # behind a first piece it makes no difference how many come together
    together, cut = [event(plain), b"".join(pieces)], [event(plain), *halves]
    assert outcome(a_stream(shows_usage=shows_usage), together) == outcome(a_stream(shows_usage=shows_usage), cut)


def test_chunks_that_are_not_plain_are_decoded_twice_only_where_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        decoded = 0

        def decode(self, content: bytes) -> object:
            self.decoded += 1
            return decoder.decode(content)

    decoder, counting = answers._TEXT_CHUNK, Counting()
    monkeypatch.setattr(answers, "_TEXT_CHUNK", counting)
    thought = event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    heard(a_stream(), [thought] * 5 + [PIECE] * 5 + [thought] * 5 + [DONE])
    assert counting.decoded == 4 + 1
    counting.decoded = 0
    odd = event({"choices": [{"delta": {"content": "a", "vendor": None}}]})
    heard(a_stream(), [odd] * 9 + [DONE])
    assert counting.decoded == 1


COUNTS = st.sampled_from([None, 0, 7, -1, 2.5, "5", 2**40])
USAGES = st.fixed_dictionaries(
    {"prompt_tokens": st.sampled_from([5, None, -1, 2**40]), "completion_tokens": st.sampled_from([3, 0, "3"])},
    optional={
        "total_tokens": st.just(8),
        "reasoning_tokens": COUNTS,
        "cached_tokens": COUNTS,
        "prompt_tokens_details": st.none() | st.fixed_dictionaries({}, optional={"cached_tokens": COUNTS}),
        "completion_tokens_details": st.none() | st.fixed_dictionaries({}, optional={"reasoning_tokens": COUNTS}),
    },
)


@given(USAGES, st.sampled_from(["stop", "length", "abort", "eos_token", "", None]), st.integers(0, 1))
def test_a_usual_answer_in_one_piece_is_read_in_one_step_as_it_is_read_by_parts(
    usage: dict[str, Any], reason: str | None, index: int
) -> None:
    def read(**more: Any) -> object:
        choice = {"index": index, "message": {"content": "a"}, "finish_reason": reason}
        whole = json.dumps({"choices": [choice], "usage": {**usage, **more}}).encode()
        try:
            return [replace(delta, body=None) for delta in PassedWhole(an_ear()).read(whole)]
        except ExpectedError as error:
            return type(error)

    # a usage with a member that is not known is read by parts
    assert read() == read(vendor=1)


@pytest.mark.parametrize("beside", [{"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_what_is_more_than_text_is_marked(beside: dict[str, Any]) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "a", **beside}}]}
    (delta,) = a_stream().feed(event(chunk))
    assert (delta.text, delta.message, delta.tokens) == ("", {}, 1)


def test_nothing_goes_out_before_the_first_piece_and_then_all_of_it() -> None:
    answer = a_stream()
    assert list(answer.feed(ROLE + COMMENT)) == []
    assert list(answer.feed(PIECE)) == [Delta(text="Grüße", raw=ROLE + COMMENT + PIECE, tokens=1)]
    assert list(answer.feed(COMMENT)) == [Delta(raw=COMMENT)]


def test_what_is_held_has_a_bound() -> None:
    answer = a_stream()
    goes = [delta for _ in range(MOST_HELD_BYTES // len(COMMENT) + 1) for delta in answer.feed(COMMENT)]
    assert len(raw_of(goes)) > MOST_HELD_BYTES


def test_usage_that_was_not_requested_is_taken_out_of_a_chunk_with_more() -> None:
    last = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}], "usage": {"prompt_tokens":3}}\n\n'
    deltas = heard(a_stream(), [last, DONE])
    assert raw_of(deltas) == last.replace(b', "usage": {"prompt_tokens":3}', b"") + DONE
    assert deltas[-1].usage == Usage(3, 0)


@pytest.mark.parametrize("between", [":", ": ", "\t: "])
def test_the_model_has_the_name_that_the_client_knows(between: str) -> None:
    text = json.dumps('"model":"theirs"')
    theirs = f'data: {{"model"{between}"theirs","choices":[{{"index":0,"delta":{{"content":{text}}}}}]}}\n\n'.encode()
    ours = theirs.replace(b'"theirs"', b'"mine"', 1)
    assert raw_of(heard(a_stream("mine"), [theirs, DONE])) == ours + DONE


@pytest.mark.parametrize("between", [b"\ndata: ", b""])
def test_a_chunk_of_several_lines_stays_an_event_when_its_model_is_renamed(between: bytes) -> None:
    model = b'data: {"model":' + between + b'"theirs",\n'
    lines = model + b'data: "choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    assert raw_of(heard(a_stream("mine"), [lines, DONE])) == lines.replace(b"theirs", b"mine") + DONE


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (event({"error": {"message": "no memory"}}), BackendErred, "no memory"),
        (event({"object": "error", "message": "bad", "code": 400}), InvalidRequest, "bad"),
        (a_chunk(None, "abort"), BackendErred, "broke the answer off"),
        (b"data: {broken\n\n", BackendErred, "nonsense"),
        (b"data: [1]\n\n", BackendErred, "nonsense"),
        (b'data: {"choices": 5}\n\n', BackendErred, "nonsense"),
        (b'data: {"choices":[{"delta":{"x":' + b"[" * 9999 + b"]" * 9999 + b"}}]}\n\n", BackendErred, "nonsense"),
    ],
)
def test_an_error_in_the_stream_is_raised_and_never_passed_on(
    bad: bytes, kind: type[ExpectedError], message: str
) -> None:
    with pytest.raises(ExpectedError, match=message) as failure:
        heard(a_stream(), [PIECE, bad])
    assert type(failure.value) is kind


def test_pieces_before_an_error_go_only_to_a_client_that_has_seen_some() -> None:
    fresh, begun = a_stream(), a_stream()
    list(begun.feed(PIECE))
    for answer, goes in ((fresh, b""), (begun, PIECE)):
        passed = list[Delta]()
        with pytest.raises(BackendFailed):
            passed.extend(answer.feed(PIECE + event({"error": "x"})))
        assert raw_of(passed) == goes


def test_a_stream_that_ends_too_early_has_failed() -> None:
    with pytest.raises(BackendFailed, match="without"):
        heard(a_stream(), [PIECE])


WHOLE = (
    b'{ "id":"x","model":"m", "choices":[{"index":1,"message":{"content":"H\\u00e9"},"finish_reason":"length"},'
    b'\n{"index":0,"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":4,"completion_tokens":6}}'
)


def test_a_whole_answer_goes_through_whole_without_a_time_of_its_first_token() -> None:
    assert PassedWhole(an_ear(2)).read(WHOLE) == [
        Delta(choice=1, body=WHOLE, finish_reason="length", is_whole=True, tokens=6),
        Delta(choice=0, finish_reason="stop", usage=Usage(4, 6)),
    ]


def test_a_whole_answer_of_one_choice_is_one_piece_and_without_usage_its_pieces_are_counted() -> None:
    body = b'{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}]}'
    assert PassedWhole(an_ear()).read(body) == [
        Delta(body=body, finish_reason="stop", usage=Usage(9, 1, is_guess=True), is_whole=True)
    ]


def test_a_whole_answer_has_the_clients_name_of_the_model() -> None:
    body = PassedWhole(an_ear(2, shown_model="mine")).read(WHOLE)[0].body
    assert body == WHOLE.replace(b'"m"', b'"mine"')


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"choices": []}'])
def test_what_is_no_answer_is_nonsense(body: bytes) -> None:
    with pytest.raises(BackendFailed, match="nonsense"):
        PassedWhole(an_ear()).read(body)


@pytest.mark.parametrize("index", [1, -1, 7])
def test_an_answer_with_an_unexpected_index_is_nonsense(index: int) -> None:
    whole = {"choices": [{"index": index, "message": {"content": "a"}, "finish_reason": "stop"}]}
    with pytest.raises(BackendFailed, match=f"answer {index} where 1"):
        heard(a_stream(), [a_chunk("a", index=index)])
    with pytest.raises(BackendFailed, match=f"answer {index} where 1"):
        PassedWhole(an_ear()).read(json.dumps(whole).encode())


def test_without_reported_usage_the_tokens_of_an_answer_in_one_piece_are_unknown() -> None:
    untold = WHOLE.replace(b'"usage"', b'"other"')
    first, *_, last = PassedWhole(an_ear(2)).read(untold)
    assert first.tokens == 0
    assert last.usage is not None
    assert last.usage.completion_tokens == 2


def test_fields_of_a_hidden_usage_chunk_move_to_the_chunk_that_ends_the_answer() -> None:
    ends = b'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n'
    hidden = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2},"system_fingerprint":"fp"}\n\n'
    changed = ends.replace(b"}]}", b'}],"system_fingerprint":"fp"}')
    deltas = heard(a_stream(), [PIECE, ends, hidden, DONE])
    assert raw_of(deltas) == PIECE + changed + DONE
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert raw_of(heard(a_stream(shows_usage=True), [PIECE, ends, hidden, DONE])) == PIECE + ends + hidden + DONE
    named = ends.replace(b"}]}", b'}],"system_fingerprint":"its own"}')
    assert raw_of(heard(a_stream(), [named, hidden, DONE])) == named + DONE


def test_the_chunk_that_ends_an_answer_is_not_lost_when_nothing_follows_it() -> None:
    answer, ends = a_stream(), a_chunk("b", "stop")
    assert raw_of(list(answer.feed(PIECE + ends))) == PIECE
    passed = list[Delta]()
    with pytest.raises(BackendFailed, match="without"):
        passed.extend(answer.end())
    assert raw_of(passed) == ends
    answer = a_stream()
    list(answer.feed(PIECE + ends))
    passed.clear()
    with pytest.raises(BackendFailed):
        passed.extend(answer.feed(event({"error": "x"})))
    assert raw_of(passed) == ends
