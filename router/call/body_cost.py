"""The memory that a body takes while it is parsed and held, estimated before it is parsed.

Measured with tracemalloc over all dialects (tests/router/call/test_body_cost.py): the estimate is above the peak of
every shape that the search there found, and at most a few times as large for ordinary chats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SLICE_BYTES = 256 * 2**10
"""A body is read in slices of this size: 1 ms each, in which the interpreter is mostly free for others."""

_OBJECT, _STRING, _COMMA = 1200, 220, 64
"""Bytes for each object, text and further element: itself, its parsed fields and its copy for other dialects."""

_COPIES = 3
"""A body as it came, while it is joined, and as a backend gets it."""

_MESSAGE = 800
"""Bytes for each message of a chat over gRPC."""

_TEXT_OBJECT, _TEXT_COMMA = 200, 44
"""Bytes for what is an object, array or element if a text is JSON itself, as the arguments of calls of tools are."""

_QUOTE = ord('"')
_FEW = 1024
"""A slice with at most this many quotes is split at them: a quarter of the time that it takes to mark each byte."""

_WIDE = 0xF0
"""The first byte of a character beyond the first 2**16: a text with one takes four bytes for each of its characters."""

_WIDE_ESCAPE = re.compile(rb"\\u[dD][89abAB]")
"""Matches the beginning of such a character as an escape."""

_AHEAD = 3
"""Bytes by which slices overlap where escapes are looked for, which are one longer."""


def cost_in_turns(body: bytes, most: float = math.inf) -> Generator[int, None, int]:
    """The bytes of memory that `body` takes at most, as JSON. Yields the bytes that were read since.

    It is read no further once that is more than `most`.
    """
    width, counted, in_text, is_escaped = 1, 0, False, False
    for at in range(0, len(body), SLICE_BYTES):
        width = max(width, _width(body[at : at + SLICE_BYTES + _AHEAD]))
        piece = body[at : at + SLICE_BYTES]
        if is_escaped:
            piece = b"_" + piece[1:]
        if b"\\" in piece:
            # pairs from the left: what is left of a run of backslashes escapes what follows it
            piece = piece.replace(rb"\\", b"__").replace(rb"\"", b"__")
        is_escaped = piece.endswith(b"\\")
        codes = np.frombuffer(piece, np.uint8)
        quotes = codes == _QUOTE
        if np.count_nonzero(quotes) <= _FEW:
            # a long text: nothing is copied but what is beside it
            parts = piece.split(b'"')
            outside = np.frombuffer(b"".join(parts[in_text::2]), np.uint8)
            texts = (len(parts) - 1 + in_text) // 2
            in_text ^= len(parts) % 2 == 0
        else:
            inside = np.logical_xor.accumulate(quotes)
            if in_text:
                inside = ~inside
            in_text = bool(inside[-1])
            outside = codes[~inside]
            texts = _count(outside, _QUOTE)
        objects, lists, commas = (_count(codes, mark) for mark in b"{[,")
        own_objects, own_lists, own_commas = (_count(outside, mark) for mark in b"{[,")
        counted += own_objects * _OBJECT + (texts + own_lists) * _STRING + own_commas * _COMMA
        counted += (objects - own_objects + lists - own_lists) * _TEXT_OBJECT + (commas - own_commas) * _TEXT_COMMA
        if len(body) * (_COPIES + width) + counted > most:
            break
        yield len(piece)
    return len(body) * (_COPIES + width) + counted


def _count(codes: NDArray[np.uint8], mark: int) -> int:
    return int(np.count_nonzero(codes == mark))


def rough_cost(body: bytes) -> int:
    """The same, at least, at once: for a small body. Its texts count as if they were JSON too."""
    counts = body.count(b"{") * _OBJECT + (body.count(b'"') // 2 + body.count(b"[")) * _STRING
    width = 1 if body.isascii() and b"\\" not in body else _width(body)
    return len(body) * (_COPIES + width) + counts + body.count(b",") * _COMMA


def _message_cost(message: bytes) -> int:
    """The same of a message over gRPC: its texts may be JSON, and LF is the tag of the messages of a chat."""
    return rough_cost(message) + message.count(b"\n") * _MESSAGE


def _message_cost_in_turns(message: bytes, _: float = math.inf) -> Generator[int, None, int]:
    yield len(message)
    return _message_cost(message)


def _width(body: bytes) -> int:
    """Bytes of its texts for each of its own, once parsed: a text, and half of it again if it is JSON itself."""
    is_ascii = body.isascii()
    # one byte is found a hundred times as fast as two
    has_escape = b"\\" in body
    if not is_ascii and np.frombuffer(body, np.uint8).max() >= _WIDE:
        return 6
    if has_escape and _WIDE_ESCAPE.search(body):
        return 6
    return 1 if is_ascii and not (has_escape and b"\\u" in body) else 3


class Costs(NamedTuple):
    """Estimates for one kind of body: of a small one at once, and of any in turns, up to a bound."""

    rough: Callable[[bytes], int]
    in_turns: Callable[[bytes, float], Generator[int, None, int]]


JSON = Costs(rough_cost, cost_in_turns)
PROTOBUF = Costs(_message_cost, _message_cost_in_turns)
