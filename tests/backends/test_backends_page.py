"""The page on backends keeps up with the catalogue: every kind, every option, and snippets that take effect."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from backends.http.backend import HttpBackend
from backends.http.exchange import HttpOptions
from backends.kinds import KINDS, Place, Surroundings, make
from policies.sla.parse import parse
from tests.contracts.catalogue import STAGES

PAGE = (Path(__file__).parents[2] / "docs/backends.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
OVER_HTTP = {
    kind: backend
    for kind in KINDS
    if isinstance(backend := make(kind, Place("b", "p", "http://h:1"), Surroundings()), HttpBackend)
}
IN_THE_FILE_ITSELF = {"key", "models", "headers", "tls", "of_file"}


def test_every_kind_is_in_the_tables() -> None:
    first, *others = re.findall(r"^\| kind \|.*?(?=\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE)) == set(KINDS)
    for table in others:
        assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) >= set(OVER_HTTP)


@pytest.mark.parametrize("kind", OVER_HTTP)
def test_every_option_of_a_kind_is_documented(kind: str) -> None:
    of_all = {field.name for field in fields(HttpOptions)} - IN_THE_FILE_ITSELF
    options = {field.name for field in fields(OVER_HTTP[kind].options_type)} - of_all - IN_THE_FILE_ITSELF
    inherited = {"takes_token_ids"} if kind != "openai_compatible" else set()
    assert [name for name in options - inherited if f"`{name}`" not in SECTIONS[kind]] == []
    assert [name for name in of_all if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("kind", OVER_HTTP)
def test_every_kind_has_a_snippet_that_takes_effect(kind: str) -> None:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", SECTIONS[kind], re.DOTALL)
    config = parse(snippet, environment={"GATEWAY_KEY": "a-key"})
    (pool,) = config.pools.values()
    assert pool.kind == kind
    for address in pool.at:
        place = Place("b", pool.name, address, pool.key, pool.models, pool.options)
        assert make(kind, place, Surroundings()).kind == kind


@pytest.mark.parametrize("kind", OVER_HTTP)
def test_every_stand_in_has_a_name_to_be_run_by(kind: str) -> None:
    assert kind in STAGES
    text = (Path(__file__).parents[1] / f"standins/{kind}.py").read_text()
    assert 'if __name__ == "__main__":' in text
