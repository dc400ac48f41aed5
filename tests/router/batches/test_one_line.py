"""A value of a backend on one line of strict JSON, however it was written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.batches.one_line import one_line

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans(), st.sampled_from(["", "\n", "\r\n \n", "\t"]))
def test_each_value_is_one_line_that_reads_the_same(value: Any, indent: int | None, escaped: bool, around: str) -> None:
    raw = (around + json.dumps(value, indent=indent, ensure_ascii=escaped) + around).encode("utf-8", "surrogatepass")
    line = one_line(raw)
    assert len(line.decode().splitlines()) == 1
    assert msgspec.json.decode(line) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b'{"a": NaN, "b": [Infinity, -Infinity, 1e999, 1.5]}', b'{"a":null,"b":[null,null,null,1.5]}'),
        (b'{"a": "\\ud83d", "b": "\\ud83d\\ude00"}', '{"a":"\ufffd","b":"\U0001f600"}'.encode()),
        (b'{"a": "two\nlines"}', b'{"a":"two\\nlines"}'),
        (b'{"a": "\xff"}', '{"a":"\ufffd"}'.encode()),
        ('{"a": "x\u2028y\u2029\u0085"}'.encode(), b'{"a":"x\\u2028y\\u2029\\u0085"}'),
        (b'[1,"succeeded",[0,0,0,0],\n{}]\n', b'[1,"succeeded",[0,0,0,0],{}]'),
    ],
)
def test_what_strict_json_lacks_is_written_as_what_it_has(raw: bytes, line: bytes) -> None:
    assert one_line(raw) == line
    msgspec.json.decode(line)


@pytest.mark.parametrize("raw", [b"", b"{", b"{} {}", b"<html>", b"[" * 100_000])
def test_what_is_no_json_is_said(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        one_line(raw)
