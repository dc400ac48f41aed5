import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llama_cpp.backend import load_of_slots
from backends.nesting import MOST_LEVELS, TooDeep, check_msgpack, decode_json, is_deep
from backends.sglang import loads_of
from backends.shard.defaults import defaults_in
from backends.tensorrt_llm import load_of
from policies.errors import BackendFailed

INTEGERS = st.integers(-(2**63), 2**64 - 1)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.text()
ENDS = SCALARS | st.just([]) | st.just({}) | st.binary() | st.lists(INTEGERS, max_size=70)
"""The value at the innermost level."""

SURROUNDINGS = st.lists(
    st.sampled_from([
        lambda inner: [inner],
        lambda inner: ["[{", inner, 2**40, -3.5],
        lambda inner: [[], inner, {}],
        lambda inner: [*range(20), inner],
        lambda inner: {"a": inner},
        lambda inner: {**{f"k{i}": "x" * i for i in range(40)}, "deep": inner},
        lambda inner: {'"]}\\': b"\xdd\xdf" * 9, "e": inner, "d": b"x" * 300},
    ]),
    max_size=12,
)  # fmt: skip


def levels(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(levels, value.values()), default=0)
    return 1 + max(map(levels, value), default=0) if isinstance(value, list) else 0


def within(inner: Any, depth: int, surroundings: list[Any]) -> Any:
    """`inner` with `depth` levels around it, the innermost of them as `surroundings` says."""
    for around in surroundings[:depth]:
        inner = around(inner)
    for _ in range(depth - len(surroundings[:depth])):
        inner = [inner]
    return inner


@given(ENDS, st.integers(MOST_LEVELS - 4, MOST_LEVELS + 2), SURROUNDINGS)
def test_the_limit_is_exact_for_each_form(end: Any, depth: int, surroundings: list[Any]) -> None:
    value = within(end, depth, surroundings)
    too_deep = levels(value) > MOST_LEVELS
    assert is_deep(value) == too_deep
    packed, text = msgspec.msgpack.encode(value), msgspec.json.encode(value)
    if too_deep:
        with pytest.raises(TooDeep):
            check_msgpack(packed)
        for spelt in (text, text.decode()):
            with pytest.raises(TooDeep, match="more than 128 levels"):
                decode_json(spelt)
    else:
        check_msgpack(packed)
        assert decode_json(text) == decode_json(text.decode()) == json.loads(text)


SIZES = (0, 1, 2, 4, 8, 15, 16, 31, 32, 255, 256, 65_535, 65_536)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("of", [
    lambda size: "x" * size,
    lambda size: b"\x91" * size,
    lambda size: msgspec.msgpack.Ext(5, b"\x91" * size),
    lambda size: [0] * size,
    lambda size: dict.fromkeys(range(size), 0),
])  # fmt: skip
def test_the_limit_is_exact_behind_values_of_every_length(of: Callable[[int], Any], size: int) -> None:
    fits = msgspec.msgpack.encode([of(size), within(0, MOST_LEVELS - 1, [])])
    check_msgpack(fits)
    with pytest.raises(TooDeep):
        check_msgpack(msgspec.msgpack.encode([of(size), within(0, MOST_LEVELS, [])]))


@pytest.mark.parametrize("depth", [MOST_LEVELS + 1, 5_000, 200_000])
def test_what_a_typed_decoder_would_skip_counts_too(depth: int) -> None:
    class Known(msgspec.Struct):
        known: int

    with pytest.raises(TooDeep):
        decode_json(b'{"known": 1, "unknown": ' + b"[" * depth + b"]" * depth + b"}", Known)
    with pytest.raises(TooDeep):
        check_msgpack(b"\x82\xa5known\x01\xa7unknown" + b"\x91" * depth + b"\xc0")


def test_many_brackets_side_by_side_or_in_texts_are_not_deep() -> None:
    value = {"rows": [[1, {"a": "[" * 999}]] * 999}
    assert decode_json(json.dumps(value)) == value
    check_msgpack(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("brackets", ["", "[" * 999, "{" * 999])
def test_what_is_no_json_is_refused_as_such(brackets: str) -> None:
    for text in (b"", b'{"a": ', b"]" * 999, b'{"a": "' + brackets.encode() + b'"'):
        with pytest.raises(msgspec.DecodeError) as refused:
            decode_json(text)
        assert not isinstance(refused.value, TooDeep)
    with pytest.raises(UnicodeDecodeError):
        decode_json(b'"' + brackets.encode() + b'\xff"')
    with pytest.raises(msgspec.ValidationError):
        decode_json(f'"{brackets}"', int)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_bytes_that_are_no_messagepack_are_left_to_the_decoder(start: bytes, rest: bytes) -> None:
    deep = False
    try:
        check_msgpack(start + rest)
    except TooDeep:
        deep = True
    openings = sum(0x80 <= byte <= 0x9F or 0xDC <= byte <= 0xDF for byte in start + rest)
    assert not deep or openings > MOST_LEVELS


@pytest.mark.parametrize(
    "page",
    [
        b"[" * 100_000,
        b'{"loads":' + b"[" * 100_000,
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
        b"[" + b"{}," * 140_000 + b"{}]",
    ],
)
@pytest.mark.parametrize("read", [load_of_slots, load_of, loads_of])
def test_a_page_of_an_engine_that_is_nested_deeply_or_has_many_values_is_nonsense(
    read: Callable[..., object], page: bytes
) -> None:
    with pytest.raises(BackendFailed, match="nonsense"):
        read(page, 1.0)
    assert defaults_in(page, "shard-1") == {}


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_a_member_that_was_left_undecoded_is_decoded_as_the_same_text_is(value: Any) -> None:
    text = msgspec.json.encode(value)
    assert decode_json(msgspec.Raw(text)) == decode_json(text) == decode_json(text.decode())


def test_a_member_that_was_left_undecoded_has_a_limit_too() -> None:
    with pytest.raises(TooDeep):
        decode_json(msgspec.Raw(b"[" * (MOST_LEVELS + 1) + b"]" * (MOST_LEVELS + 1)))
