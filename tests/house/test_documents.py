"""Documents keep up with the code: glossary, architecture, errors and the README's commands."""

import ast
import inspect
import re
import shlex
import sys
from pathlib import Path

import click
import pytest
import typer

from policies import errors, nouns
from policies.sla.parse import parse
from router.protocols.status import STATUS
from router.start.cli import app as router_app
from shards.__main__ import app as shard_app

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
README = (ROOT / "README.md").read_text()
# the first commands that a reader meets
COMMANDS = README + (ROOT / "docs/index.md").read_text()


@pytest.mark.parametrize(
    "noun",
    [name for name, value in vars(nouns).items() if inspect.isclass(value) and value.__module__ == nouns.__name__],
)
def test_every_noun_has_one_meaning_in_the_glossary(noun: str) -> None:
    assert len(re.findall(rf"^\*\*{noun}\*\*", GLOSSARY, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    "error",
    [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.ExpectedError) and value is not errors.ExpectedError
    ],
)
def test_every_error_code_is_documented(error: type[errors.ExpectedError]) -> None:
    assert f"`{error.code}`" in (ROOT / "docs/errors.md").read_text()


def test_every_code_is_documented_with_the_statuses_that_it_has() -> None:
    page = dict(re.findall(r"^\| `(\w+)` (\| .*? \| .*? \|) ", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))
    for error, status in STATUS.items():
        if error is not errors.ConfigError:  # no request ends with it
            row = page[error.code]
            assert re.search(rf"\b{status.http}\b.*\|.*\b{status.grpc.name}\b", row), f"{error.code}: {row}"


def test_the_architecture_names_every_package_and_module_that_it_should() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`((?:policies|shards|backends|router|simulation|http1|tls)/[\w/]+\.py)`", text))
    assert named, "the page names files"
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing, f"the page names files that are not there: {missing}"


@pytest.mark.parametrize("package", ["policies", "backends", "router"])
def test_the_architecture_says_what_each_folder_is_for(package: str) -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    folders = {folder.parent.name for folder in (ROOT / package).glob("*/__init__.py")}
    assert folders, f"{package} has folders"
    assert not sorted(name for name in folders if f"`{package}/{name}/`" not in text)


def test_every_make_target_in_the_readme_and_the_first_page_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z]+)", COMMANDS, re.MULTILINE)) <= targets


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^pointsman (.+)$", COMMANDS, re.MULTILINE))))
def test_every_pointsman_line_in_the_readme_and_the_first_page_is_understood(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)
    if name == "shard":
        commands: dict[str, click.Command] = {"shard": typer.main.get_command(shard_app)}
    else:
        commands = typer.main.get_command(router_app).commands  # type: ignore[attr-defined]
    commands[name].make_context(name, arguments)


def test_the_sla_file_in_the_readme_is_sound() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert parse(text, environment={"ACME_KEY": "a-key", "LABS_KEY": "another-key"}).rules


def test_every_relative_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_pages_say_nothing_about_their_authors() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"/work/|/root/|pypi\.org|helper session", page.read_text()), page


@pytest.mark.skipif(sys.version_info < (3, 12), reason="that is the one that runs")
def test_python_files_parse_on_the_oldest_supported_version() -> None:
    for package in ("policies", "shards", "backends", "router", "http1", "tls", "examples", "benchmarks"):
        for file in (ROOT / package).rglob("*.py"):
            ast.parse(file.read_text(), feature_version=(3, 11))
