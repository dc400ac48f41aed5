"""The section `aliases`: names that stand for models, with changes of the requests that use them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from policies.aliases import Alias
from policies.shapes import TEXT, Key, Many, Named, Schema, Table
from policies.sla.fields import Field
from policies.sla.pools import PoolSpec
from policies.sla.yaml_positions import Node


@dataclass(frozen=True, slots=True)
class _AnyValue:
    """Any JSON value but null."""

    def schema(self) -> Schema:
        """Any such value."""
        return {"type": ["string", "number", "boolean", "array", "object"]}


_MEMBERS = Named(_AnyValue(), free=True)

OWN = frozenset({"model", "messages", "prompt", "input", "system", "instructions", "stream"})
"""Members that no alias sets or removes: what is asked, and how the client reads it."""

ALIAS = Table(
    {
        "model": Key(TEXT, "the model that answers", required=True),
        "defaults": Key(_MEMBERS, "members of a request that did not send them, such as temperature"),
        "force": Key(_MEMBERS, "members in place of what a request sent, such as max_tokens"),
        "remove": Key(Many(TEXT), "members that are left out"),
        "system": Key(TEXT, "a system prompt, in front of the client's own"),
    }
)
ALIASES = Named(ALIAS, free=True)


def read_aliases(field: Field | None, *, pools: Mapping[str, PoolSpec]) -> dict[str, Alias]:
    """The aliases by name."""
    fields = field.entries() if field else {}
    models = {name for pool in pools.values() for name in (*pool.models, *([pool.model] if pool.model else []))}
    return {name: alias for name, entry in fields.items() if (alias := _read(entry, name, fields, models)) is not None}


def _read(field: Field, name: str, aliases: Collection[str], models: Collection[str]) -> Alias | None:
    section = field.section(ALIAS)
    model = section.read_any("model")
    if name in models:
        field.complain("is the name of a model of a pool, which could not be used any more (give it another name)")
    if model is None:
        return None
    if model in aliases:
        section.entries["model"].complain(f"is an alias itself (name a model: {', '.join(sorted(models)[:8]) or '?'})")
    kinds = ("defaults", "force")
    members = {kind: _members(section.get(kind)) for kind in kinds}
    removed = section.texts("remove")
    seen: set[str] = set()
    for kind, names in (*members.items(), ("remove", removed)):
        if repeated := sorted(seen & set(names)):
            section.entries[kind].find(repeated[0]).complain("is in two of defaults, force and remove (keep one)")
        seen |= set(names)
    if wrong := sorted(seen & OWN):
        hint = "system: has a text" if wrong[0] in ("system", "instructions") else "no alias changes it"
        field.complain(f"sets or removes `{wrong[0]}`, which is the client's own ({hint})")
    return Alias(name, model, members["defaults"], members["force"], removed, section.read_any("system"))


def _members(field: Field | None) -> dict[str, Any]:
    found = {}
    for name, entry in (field.entries() if field else {}).items():
        if entry.node.value is None:
            entry.complain("is empty (write a value, or list the name under remove)")
        else:
            found[name] = _json_of(entry.node)
    return found


def _json_of(node: Node) -> Any:
    """The value as JSON: a text that is a number or a truth value in JSON is one."""
    if isinstance(node.value, dict):
        return {key: _json_of(inner) for key, inner in node.value.items()}
    if isinstance(node.value, list):
        return [_json_of(inner) for inner in node.value]
    if node.value is None:
        return None
    try:
        value = msgspec.json.decode(node.value)
    except msgspec.DecodeError:
        return node.value
    return value if isinstance(value, int | float | bool) else node.value
