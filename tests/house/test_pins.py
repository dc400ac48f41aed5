"""Every pinned version installs on each Python that pyproject.toml admits, from its first release on."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MINORS = range(11, 20)


def pins() -> dict[str, str]:
    """Distribution -> its version in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = (re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines)
    return {canonicalize_name(pin[1]): pin[2] for pin in found if pin}


def pythons() -> list[str]:
    """The first release of each Python that the project admits: what Debian has is seldom the last one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [f"3.{minor}.0" for minor in MINORS if SpecifierSet(project["requires-python"]).contains(f"3.{minor}.0")]


def refused(requires_python: str | None) -> list[str]:
    """Those of our Pythons on which a distribution that states `requires_python` does not install."""
    return [python for python in pythons() if requires_python and python not in SpecifierSet(requires_python)]


def test_each_pinned_distribution_installs_on_every_python_that_we_admit() -> None:
    wanted, checked = pins(), 0
    refusing = {}
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if distribution.version.partition("+")[0] == wanted.get(name):
            checked += 1
            if found := refused(distribution.metadata["Requires-Python"]):
                refusing[f"{name} {distribution.version}"] = found
    assert refusing == {}
    assert checked > 100, "most pinned distributions are installed where the tests run"


@pytest.mark.parametrize(
    ("requires_python", "found"),
    [(">=3.11.5", ["3.11.0"]), (">=3.9", []), (None, []), (">=3.12", ["3.11.0"]), ("!=3.12.*,>=3.10", ["3.12.0"])],
)
def test_a_python_that_is_refused_is_named(requires_python: str | None, found: list[str]) -> None:
    assert refused(requires_python) == found
