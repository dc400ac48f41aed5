"""Kinds of backends from other distributions, found by their entry points."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from backends.kinds import GROUP, KINDS, Surroundings, kind_names, make
from backends.openai.compatible import OpenAICompatible
from policies.errors import ConfigError
from policies.sla.parse import parse
from router.start.build import build
from router.start.cli import app
from router.start.plugins import installed_catalogue
from tests.backends.test_kinds import a_place
from tests.distributions import Installer

LANES = """
    from dataclasses import dataclass

    from backends.openai.compatible import OpenAICompatible, OpenAIOptions

    @dataclass(frozen=True, slots=True)
    class LaneOptions(OpenAIOptions):
        lanes: int = 1

    class Lanes(OpenAICompatible):
        kind = "{kind}"
        options_type = LaneOptions
"""
QUIET = """
    from backends.fake import FakeBackend
    from backends.kinds import Kind, read_options
    from dataclasses import dataclass

    @dataclass(frozen=True, slots=True)
    class Options:
        loud: bool = False

    def make(place, surroundings):
        backend = FakeBackend(place.name, place.pool)
        backend.kind = "loud" if read_options(place, Options).loud else "quiet"
        return backend

    quiet = Kind(make, {"loud": bool})
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    return Installer(tmp_path, GROUP, monkeypatch)


def a_file(tmp_path: Path, pool: str) -> Path:
    file = tmp_path / "sla.yaml"
    file.write_text(f"pools: {{far: {{{pool}, model: m}}}}\n")
    return file


def test_a_class_of_http_backends_is_a_kind(install: Installer) -> None:
    install("lanes_a", LANES.format(kind="lanes_a"), "Lanes")
    text = "pools: {far: {kind: lanes_a, at: 'http://h:1', model: m, options: {lanes: 3}}}"
    backend = build(parse(text, catalogue=installed_catalogue())).gateway.cluster.backend("far-0")
    assert isinstance(backend, OpenAICompatible)
    assert (backend.kind, backend.name, backend._options.lanes) == ("lanes_a", "far-0", 3)  # type: ignore[attr-defined]


def test_any_backend_is_a_kind_if_it_can_be_built_from_options(install: Installer) -> None:
    install("quiet", QUIET, "quiet")
    for options, kind in (({}, "quiet"), ({"loud": "true"}, "loud")):
        assert make("quiet", a_place(options=options), Surroundings()).kind == kind


def test_its_name_is_known_before_it_is_loaded(install: Installer) -> None:
    install("crash", "1 / 0")
    assert kind_names() == (*KINDS, "crash")
    assert installed_catalogue().kinds == kind_names()


def test_the_schema_has_its_name(install: Installer) -> None:
    install("lanes_b", LANES.format(kind="lanes_b"), "Lanes")
    assert '"lanes_b"' in CliRunner().invoke(app, ["schema"]).output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("lans: 3", "there is no option 'lans' (did you mean 'lanes'?)"),
        ("lanes: many", "option 'lanes' must be a whole number, not 'many'"),
    ],
)
def test_check_reads_its_options(install: Installer, tmp_path: Path, options: str, says: str) -> None:
    install("lanes_c", LANES.format(kind="lanes_c"), "Lanes")
    file = a_file(tmp_path, f"kind: lanes_c, at: 'http://h:1', options: {{{options}}}")
    done = CliRunner().invoke(app, ["check", str(file)])
    assert done.exit_code == 1
    assert says in done.output.replace("\n", " ")


def test_a_name_that_no_distribution_has_is_a_mistake_in_its_line(install: Installer, tmp_path: Path) -> None:
    install("lanes_d", LANES.format(kind="lanes_d"), "Lanes")
    done = CliRunner().invoke(app, ["check", str(a_file(tmp_path, "kind: lans_d, at: 'http://h:1'"))])
    assert ":1: pools.far.kind: there is no kind of backend 'lans_d' (did you mean 'lanes_d'?)" in done.output


@pytest.mark.parametrize(
    ("name", "code", "entry", "says"),
    [
        ("kind_gone", "", "Lanes", "AttributeError"),
        ("kind_raising", "raise RuntimeError('no luck')", "Lanes", "RuntimeError: no luck"),
        ("kind_odd", "extend = 3", "extend", "it is neither a Kind nor a class of HttpBackend"),
        ("kind_other", LANES.format(kind="lanes"), "Lanes", "Lanes.kind is 'lanes', and its entry point 'kind_other'"),
    ],
)
def test_one_that_cannot_be_used_is_named_by_check(
    install: Installer, tmp_path: Path, name: str, code: str, entry: str, says: str
) -> None:
    install(name, code, entry)
    done = CliRunner().invoke(app, ["check", str(a_file(tmp_path, f"kind: {name}, at: 'http://h:1'"))])
    assert done.exit_code == 1
    assert f"'{name}' of {name} 1.2 cannot be used: " in done.output
    assert says in done.output
    assert f"fix or uninstall {name}" in done.output


def test_no_distribution_replaces_a_kind_of_ours(install: Installer) -> None:
    install("thieves", LANES.format(kind="vllm"), "Lanes", point="vllm")
    with pytest.raises(ConfigError, match=r"'vllm' of thieves 1.2 cannot be used: Pointsman has a kind of this name"):
        kind_names()


def test_two_distributions_with_one_name_are_refused(install: Installer) -> None:
    for name in ("twin_a", "twin_b"):
        install(name, LANES.format(kind="twins"), "Lanes", point="twins")
    with pytest.raises(ConfigError, match=r"twin_. 1.2 has a kind of this name too"):
        make("twins", a_place(), Surroundings())
