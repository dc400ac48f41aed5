"""The section `policies`: filter, score and pick by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from policies.catalogue import Catalogue, Part, usual_filters
from policies.compose import Filter, Policy, WeightedScore
from policies.fields import Field, Section
from policies.picks import best
from policies.quantities import read_weight

POLICY_KEYS = ("filter", "score", "pick")

T = TypeVar("T")


def read_policies(field: Field | None, *, catalogue: Catalogue) -> dict[str, Policy]:
    """All policies by name: those of the catalogue, and the file's own, which go first where names are equal."""
    fields = field.named_entries() if field else {}
    return {**catalogue.policies, **{name: _read_policy(entry, name, catalogue) for name, entry in fields.items()}}


def _read_policy(field: Field, name: str, catalogue: Catalogue) -> Policy:
    section = field.section(POLICY_KEYS)
    filters, pick = section.get("filter"), section.get("pick")
    chosen = _read_part(pick, catalogue.picks, what="pick") if pick else None
    return Policy(
        name,
        filters=usual_filters() if filters is None else _read_filters(filters, catalogue),
        scores=_read_scores(section, catalogue),
        pick=chosen[1] if chosen else best(),
    )


def _read_filters(field: Field, catalogue: Catalogue) -> tuple[tuple[str, Filter], ...]:
    found = [_read_part(item, catalogue.filters, what="filter") for item in field.items()]
    return tuple(part for part in found if part)


def _read_scores(section: Section, catalogue: Catalogue) -> tuple[WeightedScore, ...]:
    field = section.get("score")
    fields = field.section(catalogue.scores).entries if field else {}
    weights = {name: entry.read(read_weight) or 1.0 for name, entry in fields.items()}
    return tuple(WeightedScore(name, weight, catalogue.scores[name].make()) for name, weight in weights.items())


def _read_part(field: Field, parts: Mapping[str, Part[T]], *, what: str) -> tuple[str, T] | None:
    """One part, written as `name` or `{name: {option: value}}`."""
    if not isinstance(field.node.value, dict):
        name = field.one_of(parts, what=what)
        return (name, parts[name].make()) if name else None
    entries = field.section(parts).entries
    if len(field.node.value) != 1:
        field.complain(f"must be one {what}, by name or as {{name: {{option: value}}}}")
    for name, entry in entries.items():
        readers = parts[name].options
        section = entry.section(readers)
        values = {option: section.read_any(option, readers[option]) for option in section.entries}
        return name, parts[name].make(**{option: value for option, value in values.items() if value is not None})
    return None
