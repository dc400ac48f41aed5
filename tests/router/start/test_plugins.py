"""Policies from other distributions: tiny real ones, installed on the path as pip would leave them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from policies.catalogue import builtin_catalogue
from policies.errors import ConfigError
from policies.sla.parse import parse
from router.operate.what_if import WhatIf, explain_on_paper
from router.start.cli import app
from router.start.plugins import GROUP, installed_catalogue
from tests.distributions import Installer

RACKS = """
    from policies.part import Part
    from policies.quantities import read_count

    def named(*, end: int = 1):
        '''Whether its name ends so.'''
        return lambda request, candidates: [float(one.name.endswith(str(end))) for one in candidates]

    def extend(catalogue):
        return catalogue.with_parts(scores={"named": Part(named)}, filters={"never": Part(lambda: lambda r, b: False)})
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    return Installer(tmp_path, GROUP, monkeypatch)


def test_a_distribution_adds_words_that_a_file_can_use(install: Installer) -> None:
    install("racks_a", RACKS)
    config = parse(
        "pools: {own: {local: 2}}\npolicies: {default: {score: {named: 2}}}\n", catalogue=installed_catalogue()
    )
    assert explain_on_paper(WhatIf(9), config).chosen == "own-1"


def test_without_others_the_catalogue_is_the_one_that_comes_along() -> None:
    ours, theirs = builtin_catalogue(), installed_catalogue([])
    assert (theirs.scores.keys(), theirs.filters.keys()) == (ours.scores.keys(), ours.filters.keys())


def test_several_distributions_are_asked_one_after_the_other(install: Installer) -> None:
    install("racks_b", RACKS)
    install("shelves", RACKS.replace('"named"', '"shelved"').replace('"never"', '"seldom"'))
    assert {"named", "shelved"} <= installed_catalogue().scores.keys()


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("gone", "", "AttributeError"),
        ("missing", "import no_such_module_anywhere", "ModuleNotFoundError"),
        ("syntax", "def extend(:", "SyntaxError"),
        ("raising", "def extend(catalogue): raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("nothing", "def extend(catalogue): pass", "it returned a NoneType, not a Catalogue"),
        ("number", "extend = 3", "TypeError"),
        (
            "taken",
            "def extend(catalogue): return catalogue.with_parts(scores={'balance': None})",
            "'balance' is defined already",
        ),
        (
            "thief",
            "from dataclasses import replace\ndef extend(catalogue): return replace(catalogue, filters={})",
            "it removes or replaces 'healthy' of filters",
        ),
        (
            "odd",
            "def extend(catalogue): return catalogue.with_parts(picks={'mine': max})",
            "'mine' of picks is a builtin_function_or_method, not a Part",
        ),
    ],
)
def test_one_that_cannot_be_used_is_named(install: Installer, name: str, code: str, says: str) -> None:
    install(f"plugin_{name}", code)
    with pytest.raises(ConfigError) as caught:
        installed_catalogue()
    assert f"of plugin_{name} 1.2 cannot be used" in caught.value.message
    assert says in caught.value.message
    assert caught.value.hint == f"fix or uninstall plugin_{name}"


def test_the_command_line_knows_their_words(install: Installer, tmp_path: Path) -> None:
    install("racks_c", RACKS)
    file = tmp_path / "sla.yaml"
    file.write_text("policies: {default: {score: {named: 2}}}\n")
    assert "is sound" in CliRunner().invoke(app, ["check", str(file)]).output
    assert "Whether its name ends so." in CliRunner().invoke(app, ["schema"]).output


def test_the_command_line_names_the_one_that_cannot_be_used(install: Installer, tmp_path: Path) -> None:
    install("plugin_broken", "1 / 0")
    (tmp_path / "sla.yaml").write_text("")
    done = CliRunner().invoke(app, ["check", str(tmp_path / "sla.yaml")])
    assert done.exit_code == 1
    assert "ZeroDivisionError" in done.output
    assert "plugin_broken 1.2" in done.output
