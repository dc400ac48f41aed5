"""The section `usage`: where what tenants used is kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from policies.quantities import quoted, read_seconds
from policies.shapes import TEXT, Key, Scalar, Table
from policies.sla.fields import Field
from policies.sla.secrets import Outside


@dataclass(frozen=True, slots=True)
class UsageSettings:
    """Where what tenants used is kept: `store` is a file for SQLite or the URL of a PostgreSQL, `journal` a folder for
    what it does not have yet. Rows older than `keep_s` are deleted; None: never."""

    store: str = dataclasses.field(repr=False)
    journal: str
    keep_s: float | None = None


POSTGRES = ("postgresql://", "postgres://")
LEAST_KEPT_S = 40 * 86_400.0
"""Rows of the present month are always kept."""

USAGE = Table(
    {
        "store": Key(
            Scalar(str, {"type": "string", "minLength": 1}),
            "a file for SQLite, postgresql://user@host/database, or ${env:NAME} if it has a password",
            required=True,
        ),
        "journal": Key(TEXT, "a folder for what the store does not have yet; default FILE.journal for an SQLite FILE"),
        "keep": Key(read_seconds, "how long rows are kept, 40d at least; default for ever"),
    }
)


def read_usage(field: Field | None, *, outside: Outside) -> UsageSettings | None:
    """Where usage is kept; None without the section."""
    if field is None:
        return None
    section = field.section(USAGE)
    given = section.get("store")
    if given is None:
        return None
    store = given.read(lambda text: _place(text, outside))
    journal, keep_s = section.read_any("journal"), section.read_any("keep")
    if store is None:
        return None
    if journal is None and store.startswith(POSTGRES):
        field.complain("has no journal: name a folder that keeps what was used while PostgreSQL is away")
    if keep_s is not None and keep_s < LEAST_KEPT_S:
        section.entries["keep"].complain("must be 40d at least, so that a month is whole")
    return UsageSettings(store, journal or f"{store}.journal", keep_s)


def _place(text: str, outside: Outside) -> str:
    place = outside.resolve(text.strip(), lambda name: f"postgresql://{name}")
    if "://" in place and not place.startswith(POSTGRES):
        raise ValueError(f"must be a file or postgresql://..., not {quoted(place.split('://')[0])}://...")
    return place
