"""JSON on one line: what other programs wrote becomes a part of a file that has a value in each line.

A backend may indent its answer, end it with a line break, or write what strict JSON lacks. Readers of such files split
them at line breaks, some of them at each that Unicode knows.
"""

from __future__ import annotations

import json
import math
import re

import msgspec

_ANY_VALUE = msgspec.json.Decoder(msgspec.Raw)
_HALVES = re.compile("[\ud800-\udfff]")
_BREAKS = tuple((sign.encode(), f"\\u{ord(sign):04x}".encode()) for sign in "\u0085\u2028\u2029")
"""Line breaks of Unicode that strings of JSON may have as they are; each stands in a string only."""


def one_line(raw: bytes) -> bytes:
    """The value `raw` as strict JSON, on one line. Numbers that JSON lacks (NaN, Infinity) are null, and halves of
    surrogate pairs U+FFFD. Raises ValueError if it is no JSON for a lenient reader either."""
    try:
        line = msgspec.json.format(raw, indent=-1)
        # it is not checked above, nor are escaped halves of pairs
        line.decode()
        _ANY_VALUE.decode(line)
    except (ValueError, RecursionError):
        line = _lenient(raw)
    return without_breaks(line)


def without_breaks(line: bytes) -> bytes:
    """`line`, which is strict JSON on one line, with no other line break of Unicode either."""
    for sign, escaped in _BREAKS:
        if sign in line:
            line = line.replace(sign, escaped)
    return line


def _lenient(raw: bytes) -> bytes:
    try:
        text = raw.decode("utf-8", "replace")
        value = json.loads(text, strict=False, parse_constant=lambda _: None, parse_float=_number)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return _HALVES.sub("\ufffd", text).encode()


def _number(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None
