from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http.sse import Event, SseDecoder
from policies.errors import BackendFailed

STREAM = (
    b"\xef\xbb\xbf: a comment\r\n\r\ndata: one\n\nevent: ping\rdata:two\rdata: lines\r\r"
    b"id: 5\nretry: 10\n\ndata\n\ndata:  spaced \xc3\xa9\r\ndata: on\r\n\r\nunknown: x\ndata: cut off"
)
EVENTS = [Event(b"one"), Event(b"two\nlines", "ping"), Event(b""), Event(b" spaced \xc3\xa9\non")]


def test_events_are_read_as_the_standard_says() -> None:
    assert SseDecoder().feed(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM))))
def test_how_bytes_are_cut_changes_nothing(cuts: list[int]) -> None:
    decoder, places = SseDecoder(), sorted({0, len(STREAM), *cuts})
    pieces = [STREAM[start:end] for start, end in zip(places, [*places[1:], len(STREAM)], strict=True)]
    assert [event for piece in pieces for event in decoder.feed(piece)] == EVENTS


def test_byte_by_byte_changes_nothing() -> None:
    decoder = SseDecoder()
    assert [event for at in range(len(STREAM)) for event in decoder.feed(STREAM[at : at + 1])] == EVENTS


@given(st.binary())
def test_no_bytes_raise(data: bytes) -> None:
    SseDecoder().feed(data)


@pytest.mark.parametrize("data", [b"data: " + b"x" * 200, b"data: xxxxxxxxxxxx\n" * 20])
def test_a_line_or_event_without_end_is_refused(data: bytes) -> None:
    with pytest.raises(BackendFailed, match="longer than 100 bytes"):
        SseDecoder(limit_bytes=100).feed(data)
