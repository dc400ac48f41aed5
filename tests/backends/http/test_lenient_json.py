"""What Python's json writes and strict JSON lacks is read: numbers as null, halves of characters as U+FFFD."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http.lenient_json import LEAST_LOGPROB, logprob_of, read_json, strict_json, whole_characters

TEXTS = st.text(st.characters() | st.sampled_from('\ud83d\ude00"\\-NaInfinity{}[],:'), max_size=12)
NUMBERS = st.floats() | st.integers(-(2**63), 2**63)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def as_read(value: Any) -> Any:
    """`value` as it is to be read."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        # pairs that came in two halves are one character
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [as_read(part) for part in value]
    if isinstance(value, dict):
        return {as_read(name): as_read(part) for name, part in value.items()}
    return value


@given(VALUES, st.booleans())
def test_whatever_python_writes_is_read(value: Any, escapes: bool) -> None:
    raw = json.dumps(value, ensure_ascii=escapes).encode(errors="surrogatepass")
    if escapes:
        assert read_json(raw) == as_read(value)
    else:
        # a half that is written as bytes is no UTF-8
        assert isinstance(read_json(raw), type(as_read(value)))


@given(VALUES)
def test_what_is_strict_stays_byte_for_byte(value: Any) -> None:
    raw = msgspec.json.encode(as_read(value))
    assert strict_json(raw) == raw
    assert whole_characters(raw) == raw


@given(st.binary(max_size=40) | st.text('"\\u-NaInfity{}[]:,d8e0', max_size=40).map(str.encode))
def test_anything_else_raises_what_strict_decoders_raise(data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        read_json(data)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (rb'"\ud83d"', "\ufffd"),
        (rb'"\ude00 later"', "\ufffd later"),
        (rb'"\ud83d\ud83d\ude00"', "\ufffd\U0001f600"),
        (rb'"\\ud83d \"\uD83D\""', '\\ud83d "\ufffd"'),
        (b'"\xf0\x9f"', "\ufffd"),
    ],
)
def test_half_a_character_is_one_that_is_unknown(raw: bytes, text: str) -> None:
    assert read_json(raw) == text


def test_a_value_of_the_wrong_type_is_wrong_after_mending_too() -> None:
    with pytest.raises(msgspec.ValidationError):
        read_json(b'{"a": NaN, "b": 1}', dict[str, str])
    assert read_json(b'{"a": NaN, "b": "x"}', dict[str, str | None]) == {"a": None, "b": "x"}


@pytest.mark.parametrize(("written", "read"), [(None, LEAST_LOGPROB), (-1e300, LEAST_LOGPROB), (-0.5, -0.5)])
def test_a_token_of_no_probability_has_the_least_that_openai_writes(written: float | None, read: float) -> None:
    assert logprob_of(written) == read


def test_a_byte_order_mark_is_no_part_of_what_is_read() -> None:
    assert read_json(b'\xef\xbb\xbf{"a": NaN}') == {"a": None}
