"""`make pythons` finds the oldest and the newest Python that a machine has."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return import_module("pythons")


def a_python(folder: Path, minor: str, version: str | None) -> None:
    """Write an interpreter that states this version; one without a version does not run, like a shim of pyenv."""
    folder.mkdir(exist_ok=True)
    python = folder / f"python{minor}"
    python.write_text(f"#!/bin/sh\necho {version.replace('.', ' ')}\n" if version else "#!/bin/sh\nexit 127\n")
    python.chmod(0o755)


def test_interpreters_that_run_and_are_admitted_are_found_whichever_folder_has_them(
    script: ModuleType, tmp_path: Path
) -> None:
    shims, debian, pyenv = tmp_path / "shims", tmp_path / "debian", tmp_path / "pyenv"
    a_python(shims, "3.13", None)
    a_python(shims, "3.10", "3.10.13")
    a_python(debian, "3.11", "3.11.2")
    a_python(pyenv, "3.13", "3.13.0")
    a_python(pyenv, "3.11", "3.11.2")
    found = script.pythons(["3.11.0", "3.12.0", "3.13.0"], [tmp_path / "none", shims, debian, pyenv])
    assert found == {(3, 11, 2): debian / "python3.11", (3, 13, 0): pyenv / "python3.13"}


@pytest.mark.parametrize(
    ("found", "running", "runs"),
    [
        ([(3, 11, 2), (3, 11, 7), (3, 13, 0)], (3, 11, 7), [(3, 11, 2), (3, 13, 0)]),
        ([(3, 11, 7), (3, 12, 1), (3, 13, 0)], (3, 11, 7), [(3, 13, 0)]),
        ([(3, 11, 2), (3, 12, 1)], (3, 12, 1), [(3, 11, 2)]),
        ([(3, 12, 1)], (3, 12, 1), []),
        ([], (3, 12, 1), []),
    ],
)
def test_the_oldest_and_the_newest_run_besides_the_one_that_runs_all_tests(
    script: ModuleType, found: list[tuple[int, ...]], running: tuple[int, ...], runs: list[tuple[int, ...]]
) -> None:
    assert script.to_run(dict.fromkeys(found, Path("python")), running) == runs


def test_a_required_python_that_is_missing_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONS", "3.99")
    command = [sys.executable, ROOT / ".ci/pythons.py", "no-tests"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "missing: Python 3.99\n")


def test_one_that_is_alone_has_its_status(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONS", raising=False)
    monkeypatch.setattr(script, "places", list)
    assert script.main([]) == script.NOT_HERE
    assert "no other Python" in capsys.readouterr().out
