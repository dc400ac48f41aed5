"""The section `usage`."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from policies.sla.changes import fixed_changes
from policies.sla.parse import parse
from policies.sla.usage import UsageSettings


def test_a_file_has_its_journal_beside_it() -> None:
    assert parse("usage: {store: /var/usage.sqlite}").usage == UsageSettings(
        "/var/usage.sqlite", "/var/usage.sqlite.journal"
    )
    assert parse("").usage is None


def test_a_postgres_may_come_from_outside() -> None:
    url = "postgresql://user:password@host/database"
    text = "usage: {store: '${env:USAGE}', journal: /var/journal, keep: 400d}"
    assert parse(text, environment={"USAGE": url}).usage == UsageSettings(url, "/var/journal", 400 * 86_400.0)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("usage: {}", "store"),
        ("usage: {store: 'postgresql://host/database'}", "has no journal: name a folder"),
        ("usage: {store: 'mysql://host/database'}", "must be a file or postgresql://..., not 'mysql'://..."),
        ("usage: {store: '${env:USAGE}'}", "USAGE is not set"),
        ("usage: {store: u.sqlite, keep: 7d}", "must be 40d at least, so that a month is whole"),
    ],
)
def test_a_mistake_is_named(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert any(wrong in line for line in caught.value.problems), caught.value.problems


def test_it_cannot_change_while_the_router_runs() -> None:
    text = "usage: {store: other.sqlite}"
    [line] = fixed_changes(parse("usage: {store: u.sqlite}"), parse(text), text=text, source="sla.yaml")
    assert "restart to keep usage elsewhere" in line
