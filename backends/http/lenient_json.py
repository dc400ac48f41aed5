"""JSON of other programs with what strict JSON lacks: NaN and infinities, halves of surrogate pairs, bytes that are no
UTF-8, a byte order mark before it. Pure.

Python's `json` writes the first two unless it is told not to, and so do engines that are written in Python. They mostly
stand in fields that the router does not read.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar, overload

import msgspec

from backends.nesting import FEW_BYTES, TooDeep, decode_json, has_many_values

T = TypeVar("T")

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token of no probability, in place of minus infinity."""

MOST_BYTES = 1 << 19
"""Of larger data nothing is mended: 512 KiB take 13 ms."""

MOST_PLACES = 1 << 12
"""Data that lack JSON at more places are not mended: so many take 5 ms."""

MOST_VALUES = 1 << 23
"""Data with more values are not read. The 20 likeliest tokens at each of 100,000 have as many."""

_SKIPPED = dict[str, msgspec.Raw]
"""What is skipped and not decoded: 3 ms for each MB."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# each byte is looked at once, and in most data one match goes to the end
_PLAIN = re.compile(rb'(?:[^"NI-]++|"(?:[^"\\]++|\\[^u])*+"|-(?!Infinity))*+', re.DOTALL)
# a text that does not end is taken to the end
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_LACKING = re.compile(rb"-?Infinity|NaN")
# to the first half of a pair, or the end
_WHOLE = re.compile(rb"(?:[^\\]++|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u(?![dD][89a-fA-F])|\\[^u])*+", re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]..", re.DOTALL)


@overload
def read_json(data: bytes) -> Any: ...
@overload
def read_json(data: bytes, kind: type[T]) -> T: ...
def read_json(data: bytes, kind: Any = Any) -> Any:
    """The value in `data` as a `kind`, where numbers that JSON lacks are null, and what is no Unicode is U+FFFD.

    Where it has more values than may be decoded at once, other threads run meanwhile; then `kind` is Any or a Struct.
    Raises as `msgspec.json.decode` does where `data` is no JSON all the same.
    """
    if len(data) > FEW_BYTES and kind != _SKIPPED and has_many_values(data):
        return _in_turns(data, kind)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        if len(data) > MOST_BYTES:
            raise
        return decode_json(strict_json(data), kind)
    except RecursionError:
        raise TooDeep from None


class _InTurns(json.JSONDecoder):
    """Goes from value to value in Python, so that other threads run in between."""

    def __init__(self) -> None:
        super().__init__(strict=False, parse_constant=lambda _: None)
        self.parse_object, self.parse_array = json.decoder.JSONObject, json.decoder.JSONArray  # type: ignore[attr-defined]
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _in_turns(data: bytes, kind: Any) -> Any:
    if has_many_values(data, MOST_VALUES):
        raise msgspec.DecodeError(f"it has more than {MOST_VALUES} values")
    try:
        value = _InTurns().decode(data.removeprefix(_BYTE_ORDER_MARK).decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
    return value if kind is Any else msgspec.convert(value, kind)


def strict_json(data: bytes) -> bytes:
    """`data` with null in place of numbers that JSON lacks, and U+FFFD for what is no Unicode."""
    data, at, parts = data.removeprefix(_BYTE_ORDER_MARK).decode(errors="replace").encode(), 0, list[bytes]()
    while True:
        begin, at = at, _end_of(_PLAIN, data, at)
        parts.append(data[begin:at])
        if at == len(data):
            return b"".join(parts)
        if len(parts) > 2 * MOST_PLACES:
            return data
        if found := _TEXT.match(data, at):
            parts.append(whole_characters(found[0]) if b"\\u" in found[0] else found[0])
        elif found := _LACKING.match(data, at):
            parts.append(b"null")
        else:
            # no JSON at all
            return data
        at = found.end()


def whole_characters(data: bytes) -> bytes:
    """JSON `data` with U+FFFD in place of each half of a surrogate pair; itself where it has none."""
    at = _end_of(_WHOLE, data, 0)
    if _HALF.match(data, at) is None:
        return data
    view, whole, begin = memoryview(data), bytearray(), 0
    while (half := _HALF.match(data, at)) is not None:
        whole += view[begin:at]
        whole += rb"\ufffd"
        begin = half.end()
        at = _end_of(_WHOLE, data, begin)
    whole += view[begin:]
    return bytes(whole)


def logprob_of(value: Any) -> float:
    """The log-probability that a server writes as `value`; null stands for minus infinity here."""
    return LEAST_LOGPROB if value is None else max(LEAST_LOGPROB, float(value))


def _end_of(pattern: re.Pattern[bytes], data: bytes, at: int) -> int:
    found = pattern.match(data, at)
    assert found is not None, "it matches nothing, too"
    return found.end()
