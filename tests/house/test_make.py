"""No target of the Makefile is dead: those that take seconds run here, and what the others start exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = sorted(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
WRITTEN = {
    "protos": ["router/protocols/grpc/v1/inference_pb2.py", "shards/wire/v1/shard_pb2_grpc.py"],
    "command-line": ["docs/command-line.md", "router/man/pointsman.1"],
}
"""Targets that write files which are committed -> some of them."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what targets read, with an environment that starts the programs of this one."""
    tree = tmp_path_factory.mktemp("make")
    for name in ("http1", "tls", "policies", "backends", "router", "shards", "proto", "docs", ".ci"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("weights"))
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, tree)
    programs = tree / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    for mark in (".ready", ".ready-to-develop"):
        (tree / ".venv" / mark).touch()
    return tree


def make(tree: Path, *words: str) -> str:
    done = subprocess.run(["make", *words], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("target", WRITTEN)
def test_a_target_that_writes_files_writes_what_is_committed(tree: Path, target: str) -> None:
    for name in WRITTEN[target]:
        (tree / name).unlink()
    make(tree, target)
    for name in WRITTEN[target]:
        assert (tree / name).read_text() == (ROOT / name).read_text()


def test_help_lists_every_target_that_a_person_calls(tree: Path) -> None:
    listed = re.findall(r"^  make (\S+) ", make(tree, "help"), re.MULTILINE)
    assert set(TARGETS) - set(listed) == {"ready", "kernels-installed"}


def test_clean_removes_environments_and_caches_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    kept, gone = [tmp_path / "router", tmp_path / "Makefile"], [tmp_path / ".venv-3.11.2", tmp_path / ".mypy_cache"]
    shutil.copy2(tree / "Makefile", tmp_path)
    for folder in (kept[0], *gone):
        folder.mkdir()
    make(tmp_path, "clean")
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)


def test_every_target_is_phony() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)
    assert sorted(phony.split()) == TARGETS


def started() -> Iterator[tuple[str, bool]]:
    """Each file, module and program of the recipes, and whether it exists."""
    recipes = "\n".join(line for line in MAKEFILE.splitlines() if line.startswith("\t"))
    for file in sorted(set(re.findall(r"(?<![\w/])(?:\.ci|examples)/[\w/]+(?:\.py)?", recipes))):
        yield file, (ROOT / file).exists()
    for module in sorted(set(re.findall(r" -m ([\w.]+)", recipes))):
        yield module, find_spec(module) is not None
    for program in sorted(set(re.findall(r"\$\(BIN\)/([a-z]\w*)", recipes))):
        yield program, (Path(sys.prefix) / "bin" / program).exists()


@pytest.mark.parametrize(("what", "exists"), list(started()), ids=lambda value: str(value))
def test_what_a_recipe_starts_exists(what: str, exists: bool) -> None:
    assert exists, f"the Makefile starts {what}"


@pytest.mark.parametrize(
    "program", sorted(file.name for file in (ROOT / ".ci").iterdir() if file.suffix in ("", ".py") and file.is_file())
)
def test_each_program_of_ci_is_started_by_a_recipe_a_test_or_another_program(program: str) -> None:
    stem = program.removesuffix(".py")
    named = re.compile(rf"\.ci/{re.escape(program)}\b|\bfrom {stem} import|\bimport {stem}\b")
    files = [ROOT / "Makefile", *(ROOT / ".ci").glob("*"), *(ROOT / ".github/workflows").iterdir()]
    files += sorted((ROOT / "tests").rglob("test_*.py"))
    others = (file for file in files if file.is_file() and file.name != program)
    assert any(named.search(file.read_text()) for file in others), "nothing starts it: delete it"
