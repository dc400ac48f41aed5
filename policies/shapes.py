"""Shapes: the form of values in the SLA file. One table per mapping serves the parser and editors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

Schema = dict[str, Any]
"""A JSON Schema, draft 2020-12. To it YAML's `8` is a number and `"8"` a text; the parser reads both alike."""

NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

ANY_TEXT: Schema = {"type": ["string", "number", "boolean"], "pattern": r"\S"}


class Shape(Protocol):
    """The form of one value."""

    def schema(self) -> Schema:
        """The JSON Schema of such values; never stricter than the parser."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Scalar(Generic[T]):
    """A text with a meaning. `read` raises ValueError with a sentence; `looks` is its JSON Schema for editors."""

    read: Callable[[str], T]
    looks: Mapping[str, Any]

    def __call__(self, text: str) -> T:
        """The value of `text`. Raises ValueError with a sentence."""
        return self.read(text)

    def schema(self) -> Schema:
        """The JSON Schema of such texts."""
        return dict(self.looks)


TEXT = Scalar(str, ANY_TEXT)
"""Any nonempty text."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a mapping: the shape of its value, and its meaning, which editors show."""

    shape: Shape
    says: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping with known keys; null is an empty one."""

    keys: Mapping[str, Key]

    def schema(self) -> Schema:
        """Known properties and no others."""
        required = [name for name, key in self.keys.items() if key.required]
        return {
            "type": "object" if required else ["object", "null"],
            "properties": {name: {"description": key.says, **key.shape.schema()} for name, key in self.keys.items()},
            "additionalProperties": False,
            **({"required": required} if required else {}),
        }


@dataclass(frozen=True, slots=True)
class Named:
    """A mapping to values of one shape; null is an empty one. Its keys are names, or any text if `free`."""

    shape: Shape
    free: bool = False

    def schema(self) -> Schema:
        """Any property with this shape."""
        names = {} if self.free else {"propertyNames": {"pattern": f"^{NAME_PATTERN}$"}}
        return {"type": ["object", "null"], **names, "additionalProperties": self.shape.schema()}


@dataclass(frozen=True, slots=True)
class Many:
    """A nonempty list of one shape; a single value is a list of one. `nullable`: null stands for no list."""

    shape: Shape
    nullable: bool = False

    def schema(self) -> Schema:
        """A single value, or an array of at least one."""
        single = self.shape.schema()
        null = [{"type": "null"}] if self.nullable else []
        return {"anyOf": [{"type": "array", "items": single, "minItems": 1}, single, *null]}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several named things: `name` for those that can stand `alone`, else `{name: value}`."""

    options: Mapping[str, Key]
    alone: Collection[str]

    def schema(self) -> Schema:
        """A name, or an object with one property."""
        table = Table(self.options).schema()
        named = {**table, "type": "object", "minProperties": 1, "maxProperties": 1}
        return {"anyOf": [{"enum": list(self.alone)}, named]} if self.alone else named


@dataclass(frozen=True, slots=True)
class Either:
    """A value of any of these shapes."""

    shapes: tuple[Shape, ...]

    def schema(self) -> Schema:
        """Any value that one of the shapes accepts."""
        return {"anyOf": [shape.schema() for shape in self.shapes]}


def word(*known: str) -> Scalar[str]:
    """One of the `known` words."""
    return Scalar(str, {"enum": list(known)})
