"""ruff and mypy are part of the tests."""

import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import backends
import policies
import router
import shards

ROOT = Path(__file__).parents[2]
PACKAGES = {"policies": policies, "shards": shards, "backends": backends, "router": router}


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
def test_the_checkers_are_content(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_our_package_names_are_ours(name: str) -> None:
    assert Path(str(PACKAGES[name].__file__)).parent == ROOT / name
    assert set(packages_distributions().get(name, ["pointsman"])) == {"pointsman"}
