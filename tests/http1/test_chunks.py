"""The end of a body in chunks is found however its bytes are cut, and whatever its chunks hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http1.chunks import ChunkedEnd
from http1.limits import ServerLimits
from http1.request import Request
from tests.http1.parts import a_request, parsed

HEAD = a_request("Transfer-Encoding: chunked")
NEXT = a_request(method="GET", path="/next")
DATA = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from([b"\r\n", b"\n", b"0\r\n\r\n", b"\r\n\r\n", b"0;a\r\n", b"\r\n0\r\n\r\n"]).map(
        lambda part: part * 5
    ),
)
EXTENSIONS = st.sampled_from([b"", b";a", b";a=b;c", b';a="b"'])
TRAILERS = st.sampled_from([b"", b"X-A: b\r\n", b"X-A: 0\r\nX-B:\r\n"])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A body in chunks as it is sent, and its data."""
    sent, data = bytearray(), bytearray()
    for piece in draw(st.lists(DATA, max_size=6)):
        sent += b"%b%x%b\r\n%b\r\n" % (draw(st.sampled_from([b"", b"00"])), len(piece), draw(EXTENSIONS), piece)
        data += piece
    return bytes(sent) + b"0" + draw(EXTENSIONS) + b"\r\n" + draw(TRAILERS) + b"\r\n", bytes(data)


def cut(raw: bytes, sizes: list[int]) -> list[bytes]:
    """`raw` in pieces of these sizes, the last one with the rest."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(raw[at : at + size])
        at += size
    return [*pieces, raw[at:]]


@given(bodies(), st.lists(st.integers(1, 30), max_size=20))
def test_the_request_behind_a_body_is_read_however_the_bytes_are_cut(
    body: tuple[bytes, bytes], sizes: list[int]
) -> None:
    sent, data = body
    first, second = parsed(*cut(HEAD + sent + NEXT, sizes)).waiting
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert (first.is_ended, first.arrived(1 << 20), second.path) == (True, data, "/next")


@given(bodies(), st.lists(st.integers(1, 30), max_size=20))
def test_the_end_is_where_the_body_ends(body: tuple[bytes, bytes], sizes: list[int]) -> None:
    end, raw, seen = ChunkedEnd(), body[0] + NEXT, 0
    for piece in cut(raw, sizes):
        if not end.is_found:
            seen += end.within(piece)
    assert (end.is_found, raw[:seen]) == (True, body[0])


@pytest.mark.parametrize("unit", [b"1\r\nx\r\n", b"1;a\r\nx\r\n", b"00001\r\nx\r\n"])
def test_chunks_of_one_byte_are_read(unit: bytes) -> None:
    (request,) = parsed(HEAD, unit * 20_000, b"0\r\n\r\n").waiting
    assert isinstance(request, Request)
    assert (request.is_ended, request.received) == (True, 20_000)


def test_extensions_have_a_limit_in_proportion_to_the_body() -> None:
    limits = ServerLimits(head_bytes=1000)
    long = b"1;" + b"a" * 500 + b"\r\nx\r\n"
    (request,) = parsed(HEAD, *[long] * 20, limits=limits).waiting
    assert isinstance(request, Request)
    assert 1 <= request.received <= 5


@pytest.mark.parametrize("cut_at", [1, 7, 1 << 20])
@pytest.mark.parametrize("lines", [0, 1, ServerLimits().headers, ServerLimits().headers + 1])
def test_trailers_have_the_limits_of_a_head_however_they_are_cut(lines: int, cut_at: int) -> None:
    raw = HEAD + b"1\r\nx\r\n0\r\n" + b"X-A: b\r\n" * lines + b"\r\n"
    requests = parsed(*(raw[at : at + cut_at] for at in range(0, len(raw), cut_at)))
    assert requests.is_deaf is (lines > ServerLimits().headers)
