"""The version names the commit, wherever the program came from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from router import version

HASH = "0123456789abcdef0123456789abcdef01234567"
HERE = Path(version.__file__).parent


def test_a_clone_names_its_commit() -> None:
    if not (HERE.parent / ".git").exists():
        pytest.skip("this tree is no clone")
    assert re.fullmatch(r"\d+\.\d+\.\d+ \([0-9a-f]{12}(-dirty)?\)", version.version_text())


def test_an_archive_of_the_repository_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (HERE.parent / ".git").exists():
        pytest.skip("this tree is no clone")
    archive = subprocess.run(
        ["git", "archive", "HEAD", "router/commit.txt"], cwd=HERE.parent, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archive.stdout, check=True)
    monkeypatch.setattr(version, "_HERE", tmp_path / "router")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE.parent, capture_output=True, text=True, check=True)
    assert version.version_text().endswith(f" ({head.stdout[:12]})")


def test_a_copy_without_a_commit_has_its_version_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "_HERE", tmp_path / "router")
    assert re.fullmatch(r"\d+\.\d+\.\d+", version.version_text())
