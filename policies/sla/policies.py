"""The section `policies`: filter, score and pick by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from policies.catalogue import WEIGHT, Catalogue, usual_filters
from policies.compose import Filter, Policy, Score, WeightedScore, best
from policies.part import Part
from policies.quantities import read_weight, read_yes
from policies.shapes import TEXT, Choice, Either, Key, Many, Named, Scalar, Shape, Table
from policies.sla.fields import Field, Section

T = TypeVar("T")


def policy_table(catalogue: Catalogue) -> Table:
    """The form of a policy in the file, with the parts of `catalogue`."""
    scores = {name: Key(_score_shape(name, part), part.summary) for name, part in catalogue.scores.items()}
    return Table(
        {
            "filter": Key(Many(_choice(catalogue.filters)), "which backends may take a request: all filters must pass"),
            "score": Key(Table(scores), "how suitable each backend is: score and weight, or {weight, options}"),
            "waits_for_best": Key(
                read_yes, "true: full backends are scored too, and a request may wait for one while others have room"
            ),
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
    filters = _read_filters(section, catalogue) if "filter" in section else usual_filters()
    scores = _read_scores(section.section("score"), catalogue)
    parts = (
        *(catalogue.filters[part] for part, _ in filters),
        *(catalogue.scores[score.name] for score in scores),
        *((catalogue.picks[chosen[0]],) if chosen else ()),
    )
    # without a score all backends are equally good and each gets its share; without one of the usual filters a backend
    # may be chosen that a shortlist leaves out
    has_usual = {part for part, _ in usual_filters()} <= {part for part, _ in filters}
    allows_shortlist = bool(scores) and has_usual and all(part.allows_shortlist for part in parts)
    return Policy(
        name,
        filters,
        scores,
        pick=chosen[1] if chosen else best(),
        allows_shortlist=allows_shortlist,
        waits_for_best=section.read("waits_for_best", False),
    )


def _read_filters(section: Section, catalogue: Catalogue) -> tuple[tuple[str, Filter], ...]:
    found = [_read_part(item, catalogue.filters, what="filter") for item in section.items("filter")]
    return tuple(part for part in found if part)


def _read_scores(section: Section, catalogue: Catalogue) -> tuple[WeightedScore, ...]:
    found = (_read_score(name, entry, catalogue.scores[name]) for name, entry in section.entries.items())
    return tuple(score for score in found if score)


def _read_score(name: str, field: Field, part: Part[Score]) -> WeightedScore | None:
    """One score, written as `name: weight` (unless an option is required) or `name: {weight: 2, option: value}`."""
    if part.required and not isinstance(field.node.value, dict):
        field.complain(f"needs options (write {{{', '.join(f'{option}: ...' for option in sorted(part.required))}}})")
        return None
    if isinstance(field.node.value, dict):
        section = field.section(_score_table(name, part))
        weight = section.read(WEIGHT, 1.0)
        score = _made(field, part, section)
    else:
        weight, score = field.read(read_weight) or 1.0, part.make()
    return WeightedScore(name, weight, score) if score else None


def _read_part(field: Field, parts: Mapping[str, Part[T]], *, what: str) -> tuple[str, T] | None:
    """One part, written as `name` or `{name: {option: value}}`."""
    chosen = field.choice(_choice(parts), what=what)
    if chosen is None:
        return None
    name, entry = chosen
    made = _made(entry, parts[name], entry.section(_options(name, parts[name]))) if entry else parts[name].make()
    return (name, made) if made else None


def _made(field: Field, part: Part[T], section: Section) -> T | None:
    """`part` with the options of `section`; None after a complaint."""
    values = {option: section.read_any(option) for option in section.entries if option in part.options}
    given = {option: value for option, value in values.items() if value is not None}
    if not part.required <= given.keys():
        return None
    try:
        return part.make(**given)
    except ValueError as error:
        field.complain(str(error))
        return None


def _choice(parts: Mapping[str, Part[T]]) -> Choice:
    options = {name: Key(_options(name, part), part.summary) for name, part in parts.items()}
    return Choice(options, alone=tuple(name for name, part in parts.items() if not part.required))


def _score_shape(name: str, part: Part[Score]) -> Shape:
    table = _score_table(name, part)
    return table if part.required else Either((read_weight, table))


def _score_table(name: str, part: Part[Score]) -> Table:
    return Table({WEIGHT: Key(read_weight, "weight of the score; default 1"), **_options(name, part).keys})


def _options(name: str, part: Part[T]) -> Table:
    says = f"option of `{name}`: {part.summary}"
    return Table(
        {option: Key(_scalar(read), says, required=option in part.required) for option, read in part.options.items()}
    )


def _scalar(reader: Callable[[str], Any]) -> Scalar[Any]:
    """`reader` itself, or any text if it does not describe its texts."""
    return reader if isinstance(reader, Scalar) else Scalar(reader, TEXT.looks)
