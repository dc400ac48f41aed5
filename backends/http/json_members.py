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
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s]++")
_NEXT_IN_NESTED = re.compile(rb'[^"\[\]{}]*+(["\[\]{}])')

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
    members = list(_members(raw))
    there = {member.name for member in members}
    kept: list[bytes] = []
    begin = end_before = members[0].start if members else raw.index(b"{") + 1
    end = members[-1].end if members else begin
    for member in members:
        separator = raw[end_before : member.start] if kept else b""
        end_before = member.end
        value = changes.get(member.name, raw[member.value : member.end])
        if value is ABSENT:
            continue
        text = value if member.name not in changes else msgspec.json.encode(value)
        kept.append(separator + raw[member.start : member.value] + text)
    added = [(name, value) for name, value in changes.items() if name not in there and value is not ABSENT]
    for name, value in added:
        kept.append((b"," if kept else b"") + msgspec.json.encode(name) + b":" + msgspec.json.encode(value))
    return b"".join((raw[:begin], *kept, raw[end:]))


def maybe_twice(raw: bytes, names: Collection[str]) -> frozenset[str]:
    """Those of `names`, which consist of letters, that `raw` may contain more than once, by a quick check.

    Readers do not agree on which one counts then (RFC 8259, section 4).
    """
    if _SPELT_OUT.search(raw):
        return frozenset(names)
    written = ((name, b'"%b"' % name.encode()) for name in names)
    return frozenset(name for name, text in written if raw.find(text) != raw.rfind(text))


def with_more_members(raw: bytes, more: Mapping[str, Any]) -> bytes:
    """`raw`, which is one valid JSON object that is not empty, with the members `more`, none of which it has yet.

    Raises as `with_members` does, without parsing `raw`.
    """
    end = raw.rindex(b"}")
    return raw[:end] + b"," + msgspec.json.encode(more)[1:-1] + raw[end:] if more else raw


def _members(raw: bytes) -> Iterator[_Member]:
    at = _after_space(raw, raw.index(b"{") + 1)
    while raw[at] != ord("}"):
        name = _STRING.match(raw, at)
        assert name is not None, "a JSON object has names"
        value = _after_space(raw, raw.index(b":", name.end()) + 1)
        end = _end_of_value(raw, value)
        yield _Member(msgspec.json.decode(name[0], type=str), at, value, end)
        at = _after_space(raw, end)
        if raw[at] == ord(","):
            at = _after_space(raw, at + 1)


def _after_space(raw: bytes, at: int) -> int:
    found = _SPACE.match(raw, at)
    assert found is not None
    return found.end()


def _end_of_value(raw: bytes, at: int) -> int:
    if raw[at] not in b"{[":
        found = (_STRING if raw[at] == ord('"') else _SCALAR).match(raw, at)
        assert found is not None, "a JSON value is not empty"
        return found.end()
    depth = 0
    while True:
        found = _NEXT_IN_NESTED.match(raw, at)
        assert found is not None, "what JSON opens it closes"
        mark, at = found[1], found.end()
        if mark == b'"':
            inner = _STRING.match(raw, at - 1)
            assert inner is not None, "a JSON text ends"
            at = inner.end()
        else:
            depth += 1 if mark in b"{[" else -1
            if not depth:
                return at
