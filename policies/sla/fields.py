"""Fields: a file's tree, read key by key. Every mistake is recorded with line and path, and none is raised."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from policies.quantities import quoted
from policies.shapes import NAME_PATTERN, Choice, Key, Many, Scalar, Table
from policies.sla.yaml_positions import Node, Problem, joined
from policies.suggest import did_you_mean, nearest

T = TypeVar("T")

_NAME = re.compile(NAME_PATTERN, re.ASCII)

_MOST_SHOWN = 100
"""Most mistakes that are printed: a file of nonsense has as many as it has lines."""


class Unchecked(ValueError):
    """A reader cannot check its text here, and need not; `stand_in` takes the place of the value."""

    def __init__(self, sentence: str, stand_in: Any = None) -> None:
        super().__init__(sentence)
        self.stand_in = stand_in


class Problems:
    """The problems of one file, in the order of its lines: mistakes, doubts (legal but probably not intended), and
    values that were not checked.
    """

    def __init__(self, source: str, found: Iterable[Problem] = ()) -> None:
        self._source, self._found = source, list(found)
        self._doubts: list[Problem] = []
        self._unchecked: list[Problem] = []

    def __repr__(self) -> str:
        return f"<Problems of {self._source}: {len(self._found)}, and {len(self._doubts)} doubts>"

    def add(self, line: int, path: str, sentence: str) -> None:
        """Note one mistake."""
        self._found.append((line, path, sentence))

    def doubt(self, line: int, path: str, sentence: str) -> None:
        """Record a doubt."""
        self._doubts.append((line, path, sentence))

    def leave_unchecked(self, line: int, path: str, sentence: str) -> None:
        """Record a value that was not checked."""
        self._unchecked.append((line, path, sentence))

    def any_below(self, path: str) -> bool:
        """Whether a mistake is recorded at `path` or below."""
        return any(noted.startswith(path) and noted[len(path) : len(path) + 1] in "[." for _, noted, _ in self._found)

    def lines(self) -> tuple[str, ...]:
        """Mistakes as `file:line: path: sentence`, each once; of very many, the first and a count."""
        return self._rendered(self._found)

    def doubts(self) -> tuple[str, ...]:
        """The doubts, in the same form."""
        return self._rendered(self._doubts)

    def unchecked(self) -> tuple[str, ...]:
        """The values that were not checked, in the same form."""
        return self._rendered(self._unchecked)

    def _rendered(self, noted: Iterable[Problem]) -> tuple[str, ...]:
        ordered = sorted(dict.fromkeys(noted), key=lambda problem: problem[0])
        lines = [
            f"{self._source}:{line}: {f'{path}: ' if path else ''}{text}" for line, path, text in ordered[:_MOST_SHOWN]
        ]
        if len(ordered) > _MOST_SHOWN:
            last = ordered[_MOST_SHOWN][0]
            lines.append(f"{self._source}:{last}: and {len(ordered) - _MOST_SHOWN:,} more from here on")
        return tuple(lines)


class Field:
    """One place in the file: a node, its path, and where to complain. Readers return None after a complaint."""

    def __init__(self, node: Node, path: str, problems: Problems) -> None:
        self.node, self.path, self._problems = node, path, problems

    def __repr__(self) -> str:
        return f"<Field {self.path or '(root)'}, line {self.node.line}>"

    def complain(self, sentence: str) -> None:
        """Record a mistake here."""
        self._problems.add(self.node.line, self.path, sentence)

    def doubt(self, sentence: str) -> None:
        """Record a doubt here."""
        self._problems.doubt(self.node.line, self.path, sentence)

    def find(self, *path: str) -> Field:
        """The deepest entry on `path` that exists in the file; this field if none exists."""
        field = self
        for key in path:
            entries = field.node.value if isinstance(field.node.value, dict) else {}
            if key not in entries:
                break
            field = Field(entries[key], joined(field.path, key), self._problems)
        return field

    def text(self) -> str | None:
        """The field's text, if it is not empty."""
        if isinstance(self.node.value, str) and self.node.value.strip():
            return self.node.value.strip()
        self.complain(f"must be text, not {_kind(self.node)}")
        return None

    def read(self, reader: Callable[[str], T]) -> T | None:
        """The field's text as `reader` reads it; its ValueError becomes the complaint, and an Unchecked is recorded."""
        text = self.text()
        if text is None:
            return None
        try:
            return reader(text)
        except Unchecked as absent:
            self._problems.leave_unchecked(self.node.line, self.path, str(absent))
            return cast("T | None", absent.stand_in)
        except ValueError as error:
            self.complain(str(error))
            return None

    def is_sound(self) -> bool:
        """Whether no mistake is recorded here or below."""
        return not self._problems.any_below(self.path)

    def items(self) -> list[Field]:
        """The entries of a nonempty list; a single value is a list of one."""
        if not isinstance(self.node.value, list):
            return [self]
        if not self.node.value:
            self.complain("is an empty list")
        return [Field(node, f"{self.path}[{at}]", self._problems) for at, node in enumerate(self.node.value)]

    def texts(self) -> tuple[str, ...]:
        """The texts of a list, or of a single value."""
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
        """The values of a mapping from names: up to 64 letters, digits and . _ -"""
        entries = self.entries()
        for name, entry in entries.items():
            if not _NAME.fullmatch(name):
                entry.complain(f"{quoted(name)} is no name: up to 64 letters, digits and . _ -, the first not a sign")
        return entries

    def section(self, table: Table) -> Section:
        """The mapping here; all its keys must be in `table`, and the required ones must exist."""
        entries, keys = self.entries(), table.keys
        for key in sorted(entries.keys() - keys.keys()):
            entries[key].complain(f"there is no {quoted(key)} here{_hint(key, keys)}")
            if (meant := nearest(key, keys)) and meant not in entries:
                entries[meant] = entries[key]  # errors that only follow from the misspelling are not reported too
        if missing := [name for name, key in keys.items() if key.required and name not in entries]:
            self.complain(f"has no {missing[0]} (add {missing[0]}: {keys[missing[0]].says})")
        return Section({key: entry for key, entry in entries.items() if key in keys}, keys)

    def choice(self, choice: Choice, *, what: str) -> tuple[str, Field | None] | None:
        """The name of the choice and the place of its value: `name` has none, `{name: value}` has one."""
        if not isinstance(self.node.value, dict):
            name = self.one_of(choice.options, what=what)
            if name is not None and name not in choice.alone:
                self.complain(f"needs a value (write {{{name}: ...}}, {choice.options[name].says})")
                return None
            return (name, None) if name else None
        if len(self.node.value) != 1:
            self.complain(f"must be one {what}, alone or as {{name: value}}; write several as a list")
            return None
        return next(iter(self.section(Table(choice.options)).entries.items()), None)

    def one_of(self, known: Collection[str], *, what: str) -> str | None:
        """The field's text, if it is one of the `known`; `what` names their kind in the complaint."""
        text = self.text()
        if text is None or text in known:
            return text
        self.complain_of_name(text, known, what=what)
        return None

    def complain_of_name(self, name: str, known: Collection[str], *, what: str) -> None:
        """Record that `name` is no `what`, with the probable correction."""
        self.complain(f"there is no {what} {quoted(name)}{_hint(name, known)}")

    def some_of(self, known: Collection[str], *, what: str) -> tuple[str, ...]:
        """The texts of a list that are `known`, each once."""
        found = [item.one_of(known, what=what) for item in self.items()]
        return tuple(dict.fromkeys(text for text in found if text is not None))


class Section:
    """A mapping with known keys. An absent key, and one with an invalid value, has its default."""

    def __init__(self, entries: Mapping[str, Field], keys: Mapping[str, Key]) -> None:
        self.entries, self._keys = entries, keys

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    @property
    def known(self) -> Collection[str]:
        """The keys that it may have."""
        return self._keys

    def get(self, key: str) -> Field | None:
        """The field `key`, if it exists."""
        return self.entries.get(key)

    def read(self, key: str, default: T) -> T:
        """The value of `key` as its shape reads it."""
        value = self.read_any(key)
        return default if value is None else value

    def read_any(self, key: str) -> Any:
        """The value of `key` as its shape reads it; None without one."""
        shape = self._shape(key, Scalar)
        return self.entries[key].read(shape) if key in self.entries else None

    def read_many(self, key: str) -> tuple[Any, ...]:
        """The values of the list `key`, each as its shape reads it."""
        each = self._shape(key, Many).shape
        assert isinstance(each, Scalar), key
        return tuple(value for item in self.items(key) if (value := item.read(each)) is not None)

    def items(self, key: str) -> Iterator[Field]:
        """The entries of the list `key`."""
        yield from self.entries[key].items() if key in self.entries else ()

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts of the list `key`."""
        return self.entries[key].texts() if key in self.entries else ()

    def some_of(self, key: str, known: Collection[str], *, what: str) -> tuple[str, ...]:
        """The texts of the list `key` that are known."""
        return self.entries[key].some_of(known, what=what) if key in self.entries else ()

    def section(self, key: str) -> Section:
        """The mapping `key`; an empty one if it does not exist."""
        table = self._shape(key, Table)
        return self.entries[key].section(table) if key in self.entries else Section({}, table.keys)

    def _shape(self, key: str, kind: type[T]) -> T:
        shape = self._keys[key].shape
        assert isinstance(shape, kind), f"{key} is a {type(shape).__name__}"
        return shape


def _hint(word: str, known: Collection[str]) -> str:
    near = did_you_mean(word, known)
    if near:
        return f" ({near})"
    return f" (known: {', '.join(known)})" if 0 < len(known) <= 12 else ""


def _kind(node: Node) -> str:
    if isinstance(node.value, dict):
        return "a mapping"
    return "a list" if isinstance(node.value, list) else "empty" if node.value is None else quoted(node.value)
