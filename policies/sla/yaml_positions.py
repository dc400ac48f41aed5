"""YAML as text with line numbers. Scalars stay text: the reader of a field decides what `8`, `no` or `15m` means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import yaml

Event: TypeAlias = yaml.events.Event
Problem: TypeAlias = tuple[int, str, str]
"""Line, path and sentence."""

_MAX_TEXT_BYTES = 2**20
_MAX_DEPTH = 32
_MAX_NODES = 200_000
"""Most nodes, with aliases counted at each use: a small file must not unfold into a huge one."""

_UNQUOTED = re.compile(r"[:,\[]\s*(\$\{[^}]*\}|[>%@`][^,}\]#]*)")
"""Texts that YAML misreads: `>= 16k` begins a block, and the brace of `${env:NAME}` within brackets a mapping."""

_EMPTY = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its line, starting at 1. An entry of a mapping has the line of its key. None is YAML's null."""

    line: int
    value: str | list[Node] | dict[str, Node] | None
    size: int = 1


class _UnreadableError(Exception):
    """The rest of the file cannot be interpreted."""

    def __init__(self, line: int, sentence: str) -> None:
        super().__init__(sentence)
        self.problem: Problem = (line, "", sentence)


def read_yaml(text: str) -> tuple[Node, list[Problem]]:
    """The one document in `text`, and its problems. Never raises; an unreadable part is an empty node.

    Tags are rejected and never acted on. So are duplicate keys, of which the first stays, and keys that are not text.
    """
    builder = _Builder()
    try:
        if len(text.encode()) > _MAX_TEXT_BYTES:
            raise _UnreadableError(1, f"the file is larger than {_MAX_TEXT_BYTES:,} bytes")
        return builder.document(yaml.parse(text, Loader=yaml.CSafeLoader)), builder.problems
    except _UnreadableError as error:
        return Node(1, None), [*builder.problems, error.problem]
    except UnicodeEncodeError as error:
        return Node(1, None), [(_line_of(text, error.start), "", "there is a character that is not valid Unicode")]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return Node(1, None), [(line, "", f"this is not YAML: {error.problem or error.context}{_hint(text, line)}")]
    except yaml.reader.ReaderError as error:
        return Node(1, None), [(_line_of(text, error.position), "", f"this is not YAML: {error.reason}")]


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _hint(text: str, line: int) -> str:
    """A remedy, if the line begins with a tab, or has a value that needs quotes."""
    lines = text.split("\n", line)
    found = lines[line - 1] if line <= len(lines) else ""
    if "\t" in found[: -len(found.lstrip())]:
        return " (indent with spaces: this line begins with a tab)"
    unquoted = _UNQUOTED.search(found)
    return f' (put it into quotes: "{unquoted[1].strip()}")' if unquoted else ""


class _Builder:
    """Makes Nodes from events. `anchors` holds None while the anchored node is not complete."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._anchors: dict[str, Node | None] = {}

    def document(self, events: Iterator[Event]) -> Node:
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise _UnreadableError(_line(event), "there is a second document; the file holds one")
                root = self._node(next(events), events, path="", depth=0)
        return root or Node(1, None)

    def _node(self, event: Event, events: Iterator[Event], *, path: str, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise _UnreadableError(_line(event), f"it is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        assert isinstance(event, yaml.NodeEvent)
        if event.anchor:
            self._anchors[event.anchor] = None
        if (tag := getattr(event, "tag", None)) is not None:
            self.problems.append((_line(event), path, f"tags like {tag[:60]} are not supported"))
        node = self._value(event, events, path, depth)
        if node.size > _MAX_NODES:
            raise _UnreadableError(node.line, f"it has more than {_MAX_NODES:,} values, aliases unfolded")
        if event.anchor:
            self._anchors[event.anchor] = node
        return node

    def _value(self, event: Event, events: Iterator[Event], path: str, depth: int) -> Node:
        if isinstance(event, yaml.ScalarEvent):
            plain = not event.style
            return Node(_line(event), None if plain and event.value in _EMPTY else event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(inner := next(events), yaml.SequenceEndEvent):
                items.append(self._node(inner, events, path=f"{path}[{len(items)}]", depth=depth + 1))
            return Node(_line(event), items, 1 + sum(item.size for item in items))
        return self._mapping(event, events, path, depth)

    def _mapping(self, start: Event, events: Iterator[Event], path: str, depth: int) -> Node:
        entries: dict[str, Node] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self._node(event, events, path=path, depth=depth + 1)
            name = key.value if isinstance(key.value, str) else "?"
            here = joined(path, name)
            value = self._node(next(events), events, path=here, depth=depth + 1)
            if not isinstance(key.value, str):
                hint = ' (put it into quotes: "null")' if key.value is None else ""
                self.problems.append((key.line, path, f"a key must be text{hint}"))
            elif name in entries:
                self.problems.append((key.line, here, f"is here twice, first in line {entries[name].line}"))
            else:
                entries[name] = replace(value, line=key.line)
        return Node(_line(start), entries, 1 + sum(node.size for node in entries.values()))

    def _alias(self, event: yaml.AliasEvent) -> Node:
        name = event.anchor
        if name not in self._anchors:
            raise _UnreadableError(_line(event), f"there is no anchor '{name}'")
        node = self._anchors[name]
        if node is None:
            raise _UnreadableError(_line(event), f"the anchor '{name}' contains itself")
        return replace(node, line=_line(event))


def joined(path: str, key: str) -> str:
    """The path of `key` in the mapping at `path`."""
    return f"{path}.{key}" if path else key


def _line(event: Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1
