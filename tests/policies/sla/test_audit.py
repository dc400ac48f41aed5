"""The section `audit`."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from policies.sla.audit import AuditSettings
from policies.sla.changes import carried_over, fixed_changes
from policies.sla.parse import parse


def test_a_file_is_enough() -> None:
    assert parse("audit: {file: audit.log}").audit == AuditSettings("audit.log", None, 64 << 20, 16)
    assert parse("").audit is None


def test_all_of_it_can_be_set() -> None:
    text = "audit: {file: a.log, secret: '${env:AUDIT}', file_size: 2MiB, files: 3}"
    assert parse(text, environment={"AUDIT": "s"}).audit == AuditSettings("a.log", "s", 2 << 20, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("audit: {}", "audit: has no file"),
        ("audit: {file: a, secret: plain}", "audit.secret: a secret must not stand in the file"),
        ("audit: {file: a, secret: '${env:AUDIT}'}", "AUDIT is not set"),
        ("audit: {file: a, file_size: 1kB}", "audit.file_size: must be 1MiB at least"),
        ("audit: {file: a, files: 1}", "audit.files: must be 2 at least"),
        ("audit: {fiel: a}", "there is no 'fiel' here (did you mean 'file'?)"),
    ],
)
def test_a_mistake_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert any(words in line for line in caught.value.problems), caught.value.problems


def test_it_cannot_change_while_the_router_runs() -> None:
    before, text = parse("audit: {file: a}"), "audit: {file: b}"
    [line] = fixed_changes(before, parse(text), text=text, source="sla.yaml")
    assert "restart to keep the audit log elsewhere" in line
    assert carried_over(before, parse(text)).audit == before.audit
