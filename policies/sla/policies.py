"""The section `policies`: filter, score and pick by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from policies.catalogue import Catalogue, Part, usual_filters
from policies.compose import Filter, Policy, WeightedScore
from policies.picks import best
from policies.quantities import read_weight
from policies.shapes import TEXT, Choice, Key, Many, Named, Scalar, Table
from policies.sla.fields import Field, Section

T = TypeVar("T")


def policy_table(catalogue: Catalogue) -> Table:
    """The form of a policy in the file, with the parts of `catalogue`."""
    scores = {name: Key(read_weight, _first_line(part.make)) for name, part in catalogue.scores.items()}
    return Table(
        {
            "filter": Key(Many(_choice(catalogue.filters)), "which backends may take a request: all filters must pass"),
            "score": Key(Table(scores), "how suitable each backend is: score and weight"),
            "pick": Key(_choice(catalogue.picks), "how one is chosen; default best"),
        }
    )


def policies_shape(catalogue: Catalogue) -> Named:
    """The section `policies`."""
    return Named(policy_table(catalogue))


def read_policies(field: Field | None, *, catalogue: Catalogue) -> dict[str, Policy]:
    """All policies by name: the catalogue's, and the file's own, which replace those of equal name."""
    fields, table = field.named_entries() if field else {}, policy_table(catalogue)
    own = {name: _read_policy(entry.section(table), name, catalogue) for name, entry in fields.items()}
    return {**catalogue.policies, **own}


def _read_policy(section: Section, name: str, catalogue: Catalogue) -> Policy:
    pick = section.get("pick")
    chosen = _read_part(pick, catalogue.picks, what="pick") if pick else None
    return Policy(
        name,
        filters=_read_filters(section, catalogue) if "filter" in section else usual_filters(),
        scores=_read_scores(section.section("score"), catalogue),
        pick=chosen[1] if chosen else best(),
    )


def _read_filters(section: Section, catalogue: Catalogue) -> tuple[tuple[str, Filter], ...]:
    found = [_read_part(item, catalogue.filters, what="filter") for item in section.items("filter")]
    return tuple(part for part in found if part)


def _read_scores(section: Section, catalogue: Catalogue) -> tuple[WeightedScore, ...]:
    weights = {name: section.read(name, 1.0) for name in section.entries}
    return tuple(WeightedScore(name, weight, catalogue.scores[name].make()) for name, weight in weights.items())


def _read_part(field: Field, parts: Mapping[str, Part[T]], *, what: str) -> tuple[str, T] | None:
    """One part, written as `name` or `{name: {option: value}}`."""
    chosen = field.choice(_choice(parts), what=what)
    if chosen is None:
        return None
    name, entry = chosen
    section = entry.section(_options(parts[name])) if entry else None
    values = {option: section.read_any(option) for option in section.entries} if section else {}
    return name, parts[name].make(**{option: value for option, value in values.items() if value is not None})


def _choice(parts: Mapping[str, Part[T]]) -> Choice:
    options = {name: Key(_options(part), _first_line(part.make)) for name, part in parts.items()}
    return Choice(options, alone=tuple(parts))


def _options(part: Part[T]) -> Table:
    return Table({name: Key(_scalar(reader), f"see `{name}` in docs/sla.md") for name, reader in part.options.items()})


def _scalar(reader: Callable[[str], Any]) -> Scalar[Any]:
    """`reader` itself, or any text if it does not describe its texts."""
    return reader if isinstance(reader, Scalar) else Scalar(reader, TEXT.looks)


def _first_line(make: Callable[..., object]) -> str:
    return (inspect.getdoc(make) or "").split("\n")[0]
