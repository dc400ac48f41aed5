"""The difference of two SLA files, in the words of the files. Comments, form and the order of keys make none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from policies.sla.yaml_positions import Node, joined, read_yaml

MOST_SHOWN = 160
"""Characters of a value that are shown."""

_IN_ORDER = frozenset({"classes"})
"""Mappings in which the order of keys has a meaning."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """One change at `path`: the values `before` and `after`, as in the file; None where there is none."""

    path: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.path}: {self.after}"
        return (
            f"- {self.path}: {self.before}" if self.after is None else f"~ {self.path}: {self.before} -> {self.after}"
        )


def difference(before: str, after: str) -> tuple[FileChange, ...]:
    """The changes from the file `before` to the file `after`, both texts of YAML, in the order of the files."""
    return tuple(_changes(read_yaml(before)[0], read_yaml(after)[0], ""))


def _changes(before: Node, after: Node, path: str) -> Iterator[FileChange]:
    if isinstance(before.value, dict) and isinstance(after.value, dict):
        yield from _of_mappings(before.value, after.value, path)
        if path in _IN_ORDER:
            yield from _moved(before.value, after.value, path)
    elif _plain(before) == _plain(after):
        return
    elif isinstance(before.value, list) and isinstance(after.value, list):
        yield from _of_lists(before.value, after.value, path)
    elif before.value is None and isinstance(after.value, dict):
        yield from _of_mappings({}, after.value, path)
    elif after.value is None and isinstance(before.value, dict):
        yield from _of_mappings(before.value, {}, path)
    else:
        yield FileChange(path, shown(before), shown(after))


def _of_mappings(before: dict[str, Node], after: dict[str, Node], path: str) -> Iterator[FileChange]:
    for key in dict.fromkeys((*before, *after)):
        here = joined(path, key)
        if key not in after:
            yield FileChange(here, shown(before[key]), None)
        elif key in before:
            yield from _changes(before[key], after[key], here)
        elif path or not (isinstance(after[key].value, dict) and after[key].value):
            yield FileChange(here, None, shown(after[key]))
        else:
            # each entry of a new section by itself
            yield from _changes(Node(0, {}), after[key], here)


def _of_lists(before: list[Node], after: list[Node], path: str) -> Iterator[FileChange]:
    old, new = ([repr(_plain(item)) for item in items] for items in (before, after))
    for tag, old_from, old_to, new_from, new_to in SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        pairs = min(old_to - old_from, new_to - new_from)
        for number in range(pairs):
            yield from _changes(before[old_from + number], after[new_from + number], f"{path}[{new_from + number}]")
        for number in range(old_from + pairs, old_to):
            yield FileChange(f"{path}[{number}]", shown(before[number]), None)
        for number in range(new_from + pairs, new_to):
            yield FileChange(f"{path}[{number}]", None, shown(after[number]))


def _moved(before: dict[str, Node], after: dict[str, Node], path: str) -> Iterator[FileChange]:
    """The change of the order of the keys that both have."""
    old = [key for key in before if key in after]
    new = [key for key in after if key in before]
    if old != new:
        yield FileChange(f"{path} in order", ", ".join(old), ", ".join(new))


def _plain(node: Node) -> object:
    """The value without its lines. A list of one text is that text: the file may have either."""
    if isinstance(node.value, list):
        items = [_plain(item) for item in node.value]
        return items[0] if len(items) == 1 and isinstance(items[0], str) else items
    return {key: _plain(item) for key, item in node.value.items()} if isinstance(node.value, dict) else node.value


def shown(node: Node) -> str:
    """The value in YAML's flow style, on one line of at most MOST_SHOWN characters."""
    text = _flow(node)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 4]} ..."


def _flow(node: Node) -> str:
    if isinstance(node.value, list):
        return f"[{', '.join(map(_flow, node.value))}]"
    if isinstance(node.value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in node.value.items()) + "}"
    return "null" if node.value is None else " ".join(node.value.split())
