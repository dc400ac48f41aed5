from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.prefix.text_keys import CHUNK_BYTES, text_keys


def test_texts_share_the_keys_of_their_common_beginning() -> None:
    common = b"The pointsman sets the points. " * 50
    first, second = text_keys(common + b"a" * 600, 7), text_keys(common + b"b" * 600, 7)
    shared = len(common) // CHUNK_BYTES
    assert first[:shared] == second[:shared]
    assert not set(first[shared:]) & set(second[shared:])


@pytest.mark.parametrize(("text", "chunks"), [("", 0), ("x" * 255, 0), ("x" * 256, 1), ("ä" * 256, 2)])
def test_only_full_chunks_of_bytes_have_keys(text: str, chunks: int) -> None:
    assert len(text_keys(text.encode(), 1)) == chunks


def test_a_repeated_chunk_has_another_key_at_each_depth_and_below_each_root() -> None:
    keys = text_keys(b"x" * 2560, 1)
    assert len({*keys, *text_keys(b"x" * 2560, 2)}) == 20


def test_keys_stay_what_they_are() -> None:
    assert text_keys(b"pointsman " * 60, 42) == (7360032409443053240, 4719088011730460869)


@given(st.binary(max_size=3 * CHUNK_BYTES), st.integers(0, 3 * CHUNK_BYTES))
def test_keys_do_not_depend_on_where_a_text_is_divided(text: bytes, at: int) -> None:
    assert text_keys(text[at:], 3, before=text[:at]) == text_keys(text, 3)
