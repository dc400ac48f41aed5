from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http import json_members
from backends.http.json_members import ABSENT, maybe_twice, with_members, with_more_members

RAW = b'\n{ "model" : "m",\t"user":"\\u00e9\\"}{", "n":1.0,"deep": {"a":[1,{"model":"x"}], "b":"]"},\n "x":null }\n'

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=3) | st.sampled_from(["a", "b", "model"]), VALUES, max_size=5)
CHANGES = st.dictionaries(st.sampled_from(["a", "b", "model", "é"]), VALUES | st.just(ABSENT), max_size=4)


def test_a_value_is_replaced_in_its_place_and_all_other_bytes_stay() -> None:
    assert with_members(RAW, {"model": "theirs"}) == RAW.replace(b'"m"', b'"theirs"', 1)


def test_a_member_that_is_not_there_comes_last() -> None:
    assert with_members(RAW, {"salt": "s"}) == RAW.replace(b'"x":null', b'"x":null,"salt":"s"')


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("model", RAW.replace(b'"model" : "m",\t', b"")),
        ("deep", RAW.replace(b',"deep": {"a":[1,{"model":"x"}], "b":"]"}', b"")),
        ("x", RAW.replace(b',\n "x":null', b"")),
        ("none", RAW),
    ],
)
def test_a_member_leaves_with_one_comma(name: str, left: bytes) -> None:
    assert with_members(RAW, {name: ABSENT}) == left


def test_both_members_of_one_name_change_however_they_are_written() -> None:
    raw = b'{"rid":1,"r\\u0069d":2,"z":3}'
    assert with_members(raw, {"rid": ABSENT}) == b'{"z":3}'
    assert with_members(raw, {"rid": 0}) == b'{"rid":0,"r\\u0069d":0,"z":3}'


def test_an_object_may_be_empty_before_and_after() -> None:
    assert with_members(b"{ }", {"a": 1}) == b'{"a":1 }'
    assert with_members(b'{ "a": 1 }', {"a": ABSENT}) == b"{  }"


def test_more_members_come_last_and_no_other_byte_changes() -> None:
    assert with_more_members(RAW, {"salt": "s", "n2": 2}) == RAW.replace(b"null }", b'null ,"salt":"s","n2":2}')
    assert with_more_members(RAW, {}) is RAW


@given(OBJECTS, CHANGES, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_what_is_read_afterwards_is_what_was_meant(
    body: dict[str, Any], changes: dict[str, Any], ascii_only: bool, indent: Any
) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    meant = {name: value for name, value in (body | changes).items() if value is not ABSENT}
    assert json.loads(with_members(raw, changes)) == meant


@given(OBJECTS, CHANGES, st.integers(0, 2), st.integers(2, 9))
def test_the_same_is_read_however_many_quotes_are_escaped_and_however_little_is_matched_at_once(
    body: dict[str, Any], changes: dict[str, Any], few: int, matched_bytes: int
) -> None:
    raw = json.dumps({**body, "quoted": '\\"\\\\"\\'}).encode()
    changed = with_members(raw, changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_members, "_FEW", few)
        patch.setattr(json_members, "_MATCHED_BYTES", matched_bytes)
        assert with_members(raw, changes) == changed


@given(OBJECTS, st.sampled_from([None, 2]))
def test_changing_nothing_changes_no_byte(body: dict[str, Any], indent: Any) -> None:
    raw = json.dumps(body, indent=indent).encode()
    assert with_members(raw, {}) == raw


def test_a_member_that_is_there_once_is_seen_at_a_glance_however_often_a_text_has_its_name() -> None:
    raw = json.dumps({"model": "m", "text": 'say "model": "x" in \u00fc\u4e2d', "other": 1}).encode()
    assert maybe_twice(raw, ("model", "salt")) == frozenset()


# longer than what is searched for words, with few quotes and with many
TEXTS = {"none": "", "long": "a " * 50_000, "escaped": 'a "\n' * 10_000, "quotes": ["a"] * 10_000}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("second", [b'"model":2', b'"mod\\u0065l":2', b'"deep":{"model":2}'])
def test_what_may_be_there_twice_is_named(second: bytes, text: Any) -> None:
    for raw in (b'{"model":1,"text":%b,%b}', b'{%b,"text":%b,"model":1}'):
        parts = (json.dumps(text).encode(), second)
        body = raw % (parts if raw.endswith(b"%b}") else parts[::-1])
        assert maybe_twice(body, ("model",)) == {"model"}
        assert maybe_twice(body, ()) == frozenset()


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_there_once_is_not_named_whatever_is_beside_it(text: Any) -> None:
    body = json.dumps({"model": "m", "stream_options": {"a": "model \u00e9"}, "text": text}).encode()
    assert maybe_twice(body, ("model", "stream_options")) == frozenset()


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_long_body_is_changed_in_the_same_way(text: Any) -> None:
    body = {"text": text, "model": "m", "other": text}
    changed = with_members(json.dumps(body).encode(), {"model": "theirs", "text": ABSENT, "salt": 1})
    assert json.loads(changed) == {"model": "theirs", "other": text, "salt": 1}
