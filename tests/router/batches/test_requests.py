"""The requests of a message batch, found without reading the body whole."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InvalidRequest, RequestTooLarge
from router.batches import requests
from router.batches.requests import requests_in

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def found(body: bytes, most_bytes: int = 1 << 20) -> list[Any]:
    return list(requests_in(io.BytesIO(body), most_bytes=most_bytes))


@given(st.lists(VALUES, max_size=8), st.sampled_from([None, 2]), st.integers(1, 40))
def test_they_are_those_of_the_whole_body(entries: list[Any], indent: int | None, read_bytes: int) -> None:
    body = json.dumps({"a": 1, "requests": entries, "z": [{}]}, indent=indent, ensure_ascii=False).encode()
    before, requests._READ_BYTES = requests._READ_BYTES, read_bytes
    try:
        assert found(body) == entries
    finally:
        requests._READ_BYTES = before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "'{' is expected"),
        (b"[]", "'{' is expected"),
        (b"{}", "`requests` is missing"),
        (b'{"requests": {}}', "is expected at '{}"),
        (b'{"requests": [1 2]}', "',' is expected"),
        (b'{"requests": [1,]}', "not valid JSON"),
        (b'{"requests": [{]}', "not valid JSON"),
        (b'{"requests": [1]', "',' is expected"),
        (b'{"requests": []} x', "something follows"),
        (b'{"requests": [], "requests": []}', "different members"),
        (b"{7: []}", "different members"),
        (b'{"requests": ["\xff"]}', "not UTF-8"),
        (b'{"requests": [' + b"[" * 100_000, "not valid JSON"),
        (b'{"requests": [' + b"9" * 5000 + b"]}", "not valid JSON"),
    ],
)
def test_a_mistake_is_named(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        found(body)


def test_one_request_may_not_be_too_large() -> None:
    body = b'{"requests": ["' + b"x" * 10_000_000
    with pytest.raises(RequestTooLarge, match="larger than 1,000,000 bytes"):
        found(body, 1_000_000)


@pytest.mark.parametrize("digits", [4301, 5000, 1 << 18, 600_000])
@pytest.mark.parametrize("form", ['{"requests":[%s]}', '{"other":%s,"requests":[]}', '{"requests":[{"a":-%s', "{%s"])
def test_a_number_with_more_digits_than_python_reads_is_refused(form: str, digits: int) -> None:
    with pytest.raises((InvalidRequest, RequestTooLarge)):
        found((form % ("9" * digits)).encode())
