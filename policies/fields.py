"""Fields: a file's tree, read key by key. Every mistake is noted with line and path, and none is raised."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from policies.quantities import quoted
from policies.suggest import did_you_mean
from policies.yaml_positions import Node, Problem, joined

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Problems:
    """What is wrong with one file, in the order of its lines."""

    def __init__(self, source: str, found: Iterable[Problem] = ()) -> None:
        self._source, self._found = source, list(found)

    def __repr__(self) -> str:
        return f"<Problems of {self._source}: {len(self._found)}>"

    def add(self, line: int, path: str, sentence: str) -> None:
        """Note one mistake."""
        self._found.append((line, path, sentence))

    def any_below(self, path: str) -> bool:
        """Is something noted at `path` or below?"""
        return any(noted.startswith(path) and noted[len(path) : len(path) + 1] in "[." for _, noted, _ in self._found)

    def lines(self) -> tuple[str, ...]:
        """`file:line: path: sentence`, each mistake once."""
        ordered = sorted(dict.fromkeys(self._found), key=lambda problem: problem[0])
        return tuple(f"{self._source}:{line}: {f'{path}: ' if path else ''}{says}" for line, path, says in ordered)


class Field:
    """One place in the file: a node, its path, and where to complain. Readers give None where they have complained."""

    def __init__(self, node: Node, path: str, problems: Problems) -> None:
        self.node, self.path, self._problems = node, path, problems

    def __repr__(self) -> str:
        return f"<Field {self.path or '(root)'}, line {self.node.line}>"

    def complain(self, sentence: str) -> None:
        """Note that something is wrong here."""
        self._problems.add(self.node.line, self.path, sentence)

    def text(self) -> str | None:
        """The field's text, if it is not empty."""
        if isinstance(self.node.value, str) and self.node.value.strip():
            return self.node.value.strip()
        self.complain(f"must be text, not {_kind(self.node)}")
        return None

    def read(self, reader: Callable[[str], T]) -> T | None:
        """What `reader` makes of the field's text; its ValueError is the complaint."""
        text = self.text()
        if text is None:
            return None
        try:
            return reader(text)
        except ValueError as error:
            self.complain(str(error))
            return None

    def is_sound(self) -> bool:
        """Has nothing been noted here or below?"""
        return not self._problems.any_below(self.path)

    def items(self) -> list[Field]:
        """The entries of a list that is not empty; a value alone is a list of one."""
        if not isinstance(self.node.value, list):
            return [self]
        if not self.node.value:
            self.complain("is an empty list")
        return [Field(node, f"{self.path}[{at}]", self._problems) for at, node in enumerate(self.node.value)]

    def texts(self) -> tuple[str, ...]:
        """The texts of a list, or of a value alone."""
        return tuple(text for item in self.items() if (text := item.text()) is not None)

    def entries(self) -> dict[str, Field]:
        """The values of a mapping by key; empty for null."""
        if self.node.value is None:
            return {}
        if not isinstance(self.node.value, dict):
            self.complain(f"must be a mapping (name: value), not {_kind(self.node)}")
            return {}
        return {key: Field(node, joined(self.path, key), self._problems) for key, node in self.node.value.items()}

    def named_entries(self) -> dict[str, Field]:
        """The values of a mapping whose keys are names: up to 64 letters, digits and . _ -"""
        entries = self.entries()
        for name, entry in entries.items():
            if not _NAME.fullmatch(name):
                entry.complain(f"{quoted(name)} is no name: up to 64 letters, digits and . _ -, the first not a sign")
        return entries

    def section(self, known: Collection[str]) -> Section:
        """The mapping here, whose keys must all be `known`."""
        entries = self.entries()
        for key in entries.keys() - set(known):
            entries[key].complain(f"there is no {quoted(key)} here{_hint(key, known)}")
        return Section({key: entry for key, entry in entries.items() if key in known})

    def one_of(self, known: Collection[str], *, what: str) -> str | None:
        """The field's text, if it is one of the `known`; `what` they are is for the complaint."""
        text = self.text()
        if text is None or text in known:
            return text
        self.complain(f"there is no {what} {quoted(text)}{_hint(text, known)}")
        return None

    def some_of(self, known: Collection[str], *, what: str) -> tuple[str, ...]:
        """Those texts of a list that are `known`, each once."""
        found = [item.one_of(known, what=what) for item in self.items()]
        return tuple(dict.fromkeys(text for text in found if text is not None))


class Section:
    """A mapping with known keys. An absent key, and one whose value is wrong, has its default."""

    def __init__(self, entries: Mapping[str, Field]) -> None:
        self.entries = entries

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def get(self, key: str) -> Field | None:
        """The field `key`, if it is there."""
        return self.entries.get(key)

    def read(self, key: str, reader: Callable[[str], T], default: T) -> T:
        """The value of `key` as `reader` understands it."""
        value = self.entries[key].read(reader) if key in self.entries else None
        return default if value is None else value

    def read_any(self, key: str, reader: Callable[[str], T]) -> T | None:
        """The value of `key` as `reader` understands it; None without one."""
        return self.entries[key].read(reader) if key in self.entries else None

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts of the list `key`."""
        return self.entries[key].texts() if key in self.entries else ()

    def some_of(self, key: str, known: Collection[str], *, what: str) -> tuple[str, ...]:
        """Those texts of the list `key` that are known."""
        return self.entries[key].some_of(known, what=what) if key in self.entries else ()

    def section(self, key: str, known: Collection[str]) -> Section:
        """The mapping `key`; an empty one where there is none."""
        return self.entries[key].section(known) if key in self.entries else Section({})


def _hint(word: str, known: Collection[str]) -> str:
    near = did_you_mean(word, known)
    if near:
        return f" ({near})"
    return f" (known: {', '.join(known)})" if 0 < len(known) <= 12 else ""


def _kind(node: Node) -> str:
    if isinstance(node.value, dict):
        return "a mapping"
    return "a list" if isinstance(node.value, list) else "empty" if node.value is None else quoted(node.value)
