from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http.frames import FrameDecoder
from policies.errors import BackendFailed


@given(frames=st.lists(st.binary(max_size=20)), cuts=st.lists(st.integers(1, 7)))
def test_messages_come_whole_however_they_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    frames = [frame.replace(b"\0", b"x") for frame in frames]
    data, decoder, heard, at = b"".join(frame + b"\0" for frame in frames), FrameDecoder(b"\0"), [], 0
    for size in [*cuts, len(data)]:
        heard += decoder.feed(data[at : at + size])
        at += size
    assert heard == [frame for frame in frames if frame.strip()]
    assert decoder.rest() == b""


def test_what_no_separator_ends_is_the_rest() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(b"a\n\nb") == [b"a"]
    assert repr(decoder) == "<FrameDecoder 1 bytes of a message>"
    assert (decoder.rest(), decoder.rest()) == (b"b", b"")


def test_a_message_without_an_end_is_a_failure_not_a_leak() -> None:
    decoder = FrameDecoder(limit_bytes=4)
    assert decoder.feed(b"abcd\nab") == [b"abcd"]
    with pytest.raises(BackendFailed, match="longer than 4 bytes"):
        decoder.feed(b"cde")
