"""The kinds of JSON that a schema allows, as far as readers of arguments need to know. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

ALL_KINDS = frozenset({"string", "number", "boolean", "null", "array", "object"})
"""Whole numbers are numbers."""

TEXT_ALONE = frozenset({"string"})


def kinds_of_properties(schema: Any) -> dict[str, frozenset[str]]:
    """The kinds of each property of `schema`, the parameters of a tool."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: kinds_of(each, schema) for name, each in properties.items()}


def kinds_of(schema: Any, root: Any, known: dict[str, frozenset[str]] | None = None) -> frozenset[str]:
    """The kinds of values that `schema` allows, which may refer to parts of `root`; all kinds where it is unclear.

    `known` has the kinds of references: each is followed once, so that the work has a bound.
    """
    if not isinstance(schema, Mapping):
        return ALL_KINDS
    found, known = [ALL_KINDS], {} if known is None else known
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = ALL_KINDS
            known[reference] = kinds_of(referred(reference, root), root, known)
        found.append(known[reference])
    for parts in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(parts, list) and parts:
            found += [frozenset().union(*(kinds_of(each, root, known) for each in parts))]
    if isinstance(schema.get("allOf"), list):
        found += [kinds_of(each, root, known) for each in schema["allOf"]]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        found.append(frozenset(map(_kind, schema["enum"])))
    if "const" in schema:
        found.append(frozenset({_kind(schema["const"])}))
    types = schema.get("type")
    named = [types] if isinstance(types, str) else types
    if isinstance(named, list):
        kinds = frozenset("number" if each == "integer" else each for each in named if isinstance(each, str))
        found.append(kinds & ALL_KINDS or ALL_KINDS)
    return reduce(frozenset.__and__, found) or ALL_KINDS


def referred(reference: str, root: Any) -> Any:
    """The part of `root` that a `reference` such as `#/$defs/Unit` names; None if there is none."""
    if not reference.startswith("#"):
        return None
    for name in reference.removeprefix("#").removeprefix("/").split("/"):
        if name:
            root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "number"
    return "array" if isinstance(value, list) else "object"
