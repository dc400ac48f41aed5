"""A JSON object with some of its members changed and every other byte as it came. Pure.

Source: RFC 8259, sections 4 and 7.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

_SPACE = re.compile(rb"[ \t\n\r]*+")
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s]++")
_NO_MARK = re.compile(rb'[^"\[\]{}]*+')

_MATCHED_BYTES = 256 * 2**10
"""What one match looks at, at most: no other thread runs meanwhile, 4 ms here."""

_LONG = 32 * 2**10
"""In bodies beyond this size quotes are found first: a single byte is found twenty times as fast as a word."""

_BYTES_EACH = 2048
"""A body with more quotes than one in so many bytes is searched for words: to look at each would take longer."""

_FEW = 512
"""Escaped quotes of a text that are looked at one by one, in 0.3 ms at most."""

_QUOTE, _BACKSLASH = ord('"'), ord("\\")

# letters that no encoder escapes
_SPELT_OUT = re.compile(rb"\\u00[4-7]")


class Absent(enum.Enum):
    """Marks a missing member; None is JSON's null."""

    ABSENT = enum.auto()


ABSENT = Absent.ABSENT


class _Member(NamedTuple):
    name: str
    start: int
    value: int
    end: int


def with_members(raw: bytes, changes: Mapping[str, Any]) -> bytes:
    """`raw`, which is one valid JSON object, with the members `changes`; those that are ABSENT are left out.

    An existing member keeps its place, a new one comes last. Of a duplicate name, both change.
    Raises TypeError or OverflowError for a value that JSON has no word for.
    """
    members, view = list(_members(raw)), memoryview(raw)
    there = {member.name for member in members}
    # views are copied only once, when all is joined
    kept: list[bytes | memoryview] = []
    begin = end_before = members[0].start if members else raw.index(b"{") + 1
    end = members[-1].end if members else begin
    for member in members:
        before = view[end_before if kept else member.start : member.value]
        end_before = member.end
        value = changes.get(member.name, view[member.value : member.end])
        if value is not ABSENT:
            kept += (before, msgspec.json.encode(value) if member.name in changes else value)
    added = [(name, value) for name, value in changes.items() if name not in there and value is not ABSENT]
    for name, value in added:
        kept.append((b"," if kept else b"") + msgspec.json.encode(name) + b":" + msgspec.json.encode(value))
    return b"".join((view[:begin], *kept, view[end:]))


def maybe_twice(raw: bytes, names: Collection[str]) -> frozenset[str]:
    """Those of `names`, which consist of letters, that `raw` may contain more than once, by a quick check.

    Readers do not agree on which one counts then (RFC 8259, section 4).
    """
    if len(raw) > _LONG and (found := _maybe_twice_quoted(raw, names)) is not None:
        return found
    if b"\\" in raw and b"\\u00" in raw and _SPELT_OUT.search(raw):
        return frozenset(names)
    twice = []
    for name in names:
        written = b'"%b"' % name.encode()
        if raw.find(written) != raw.rfind(written):
            twice.append(name)
    return frozenset(twice)


def _maybe_twice_quoted(raw: bytes, names: Collection[str]) -> frozenset[str] | None:
    """The same, by a look at what is between two quotes and short enough; None if there are many quotes."""
    wanted = {name.encode(): name for name in names}
    most = max(map(len, wanted), default=0) * len("\\u0061")
    once, twice = set[bytes](), set[str]()
    at = raw.find(b'"')
    for _ in range(len(raw) // _BYTES_EACH):
        begin, at = at + 1, raw.find(b'"', at + 1)
        if at < 0:
            return frozenset(twice)
        if at - begin <= most:
            quoted = raw[begin:at]
            if quoted in once:
                twice.add(wanted[quoted])
            elif quoted in wanted:
                once.add(quoted)
            elif _SPELT_OUT.search(quoted):
                return frozenset(names)
    return None


def with_more_members(raw: bytes, more: Mapping[str, Any]) -> bytes:
    """`raw`, which is one valid JSON object that is not empty, with the members `more`, none of which it has yet.

    Raises as `with_members` does, without parsing `raw`.
    """
    if not more:
        return raw
    view, end = memoryview(raw), raw.rindex(b"}")
    # views are copied only once
    return b"".join((view[:end], b",", msgspec.json.encode(more)[1:-1], view[end:]))


def _members(raw: bytes) -> Iterator[_Member]:
    at = _after_space(raw, raw.index(b"{") + 1)
    while raw[at] != ord("}"):
        name_end = _end_of_string(raw, at)
        value = _after_space(raw, raw.index(b":", name_end) + 1)
        end = _end_of_value(raw, value)
        yield _Member(msgspec.json.decode(raw[at:name_end], type=str), at, value, end)
        at = _after_space(raw, end)
        if raw[at] == ord(","):
            at = _after_space(raw, at + 1)


def _after_space(raw: bytes, at: int) -> int:
    found = _SPACE.match(raw, at)
    assert found is not None
    return found.end()


def _end_of_value(raw: bytes, at: int) -> int:
    if raw[at] == _QUOTE:
        return _end_of_string(raw, at)
    if raw[at] not in b"{[":
        found = _SCALAR.match(raw, at)
        assert found is not None, "a JSON value is not empty"
        return found.end()
    depth = 0
    while True:
        at = _end_of(_NO_MARK, raw, at)
        mark = raw[at]
        if mark == _QUOTE:
            at = _end_of_string(raw, at)
        elif mark in b"{[":
            depth, at = depth + 1, at + 1
        elif mark in b"]}":
            depth, at = depth - 1, at + 1
            if not depth:
                return at


def _end_of_string(raw: bytes, at: int) -> int:
    """Where the text ends that begins at `at`, with its quotes."""
    at += 1
    for _ in range(_FEW):
        end = raw.index(b'"', at)
        if raw[end - 1] != _BACKSLASH:
            return end + 1
        text = raw[at:end]
        # each pair of backslashes is one that is escaped
        if (len(text) - len(text.rstrip(b"\\"))) % 2 == 0:
            return end + 1
        at = end + 1
    while raw[at := _end_of(_IN_STRING, raw, at)] != _QUOTE:
        # a match that is cut ends before the backslash of an escape
        pass
    return at + 1


def _end_of(pattern: re.Pattern[bytes], raw: bytes, at: int) -> int:
    found = pattern.match(raw, at, at + _MATCHED_BYTES)
    assert found is not None, "it matches nothing, too"
    return found.end()
