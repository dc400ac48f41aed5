"""Server-sent events from bytes, however they are cut. Source: WHATWG HTML, section 9.2."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from backends.nesting import MOST_AT_ONCE, has_many_values
from policies.errors import BackendErred

_LINE_END = re.compile(rb"\r\n|\n|\r")
# a carriage return at the end counts as a line's end; a newline after it begins the next block, and is not a line
_BLOCK_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_MOST_END = 3
"""Bytes of a block's end that may begin a line end of two, and a second one."""

_LONG = 64 << 10
"""Reads and events up to this size need no look at their limits."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its data, lines joined by a newline, and its name ("message" if it has none)."""

    data: bytes
    name: str = "message"


class SseBlocks:
    """Takes bytes, returns blocks between blank lines, each with its blank line: joined, they are the input.

    A block is at most `limit_bytes` long, and has few enough lines and values to be read at once. So many bytes of the
    next one have `begun`: those are looked at no more, but for the last ones.
    """

    def __init__(self, limit_bytes: int = 4 << 20) -> None:
        self._limit_bytes, self._long = limit_bytes, min(limit_bytes, _LONG)
        self.begun = 0
        self._parts: list[bytes] = []
        self._end = b""

    def __repr__(self) -> str:
        return f"<SseBlocks {self.begun} bytes of a block>"

    def plain(self, data: bytes) -> bytes | None:
        """The data of the event that `data` is, if that is one line and nothing else: what most reads bring.

        None for anything else: then `feed` it.
        """
        is_line = data.find(b"\n") == len(data) - 2 and data.startswith(b"data: ") and data.endswith(b"\n\n")
        if self.begun or not is_line or b"\r" in data or len(data) > self._long:
            return None
        return data[6:-2]

    def feed(self, data: bytes) -> list[bytes]:
        """The blocks that `data` completes. Raises BackendErred if one is too long."""
        if not self.begun and data.find(b"\n\n") == len(data) - 2 > 0 and b"\r" not in data:
            # what nearly every read brings
            if len(data) > self._long:
                self._refuse_if_large([data], len(data))
            return [data]
        before, total = self._end, self.begun + len(data)
        blocks = _cut(before + data if before else data)
        rest = blocks.pop()
        if blocks and self._parts:
            blocks[0] = b"".join((*self._parts, blocks[0][len(before) :]))
        if blocks:
            self._parts, self.begun = [rest] if rest else [], len(rest)
        elif data:
            self._parts.append(data)
            self.begun = total
        self._end = rest[-_MOST_END:]
        if total > self._long:
            self._refuse_if_large(blocks, max([self.begun, *map(len, blocks)]))
        return blocks

    def _refuse_if_large(self, blocks: list[bytes], size: int) -> None:
        if size > self._limit_bytes:
            raise BackendErred(f"a line or event of the stream is longer than {self._limit_bytes} bytes")
        if any(map(has_many_values, blocks)):
            raise BackendErred(f"an event of the stream has more than {MOST_AT_ONCE} values")
        if any(block.count(b"\n") + block.count(b"\r") > MOST_AT_ONCE for block in blocks):
            raise BackendErred(f"an event of the stream has more than {MOST_AT_ONCE} lines")


class SseDecoder:
    """Takes bytes, returns whole events. An event that the end of the stream cuts off is dropped.

    What belongs to one event is at most `limit_bytes` long.
    """

    def __init__(self, limit_bytes: int = 4 << 20) -> None:
        self._blocks = SseBlocks(limit_bytes)

    def __repr__(self) -> str:
        return f"<SseDecoder of {self._blocks!r}>"

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes. Raises BackendErred if one is too long."""
        return [event for block in self._blocks.feed(data) if (event := event_in(block)) is not None]


def data_in(block: bytes) -> bytes | None:
    """The data of the event that `block` is; None if it has none, as a comment has none."""
    if is_plain(block):
        return block[6:-2]
    event = event_in(block)
    return None if event is None else event.data


def event_in(block: bytes) -> Event | None:
    """The event that `block` is; None if it has no data, as a comment has none."""
    if is_plain(block):
        return Event(block[6:-2])
    data, name = [], ""
    # it may only stand at the very beginning, outside any line; elsewhere no line begins with it
    for line in _LINE_END.split(block.removeprefix(_BYTE_ORDER_MARK)):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode(errors="replace")
    return Event(b"\n".join(data), name or "message") if data else None


def block_of(data: bytes, name: str = "message") -> bytes:
    """The block that is the event of `name` with `data`, which may be of several lines that end with newlines."""
    head = b"" if name == "message" else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def is_plain(block: bytes) -> bool:
    """Whether it is one line of data, `block[6:-2]`, and nothing else, as nearly every server writes."""
    return block.startswith(b"data: ") and block.find(b"\n") == len(block) - 2 and b"\r" not in block


def _cut(waiting: bytes) -> list[bytes]:
    """Whole blocks, then the rest."""
    if b"\r" not in waiting:
        blocks = waiting.split(b"\n\n")
        for at in range(len(blocks) - 1):
            blocks[at] += b"\n\n"
        return blocks
    ends = [0, *(found.end() for found in _BLOCK_END.finditer(waiting)), len(waiting)]
    return [waiting[start:end] for start, end in pairwise(ends)]
