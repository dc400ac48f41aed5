"""Every pinned version installs on each Python that pyproject.toml admits, from its first release on."""

from __future__ import annotations

import zipfile
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """.ci/pins.py."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return import_module("pins")


def refused(requires_python: str | None, pythons: list[str]) -> list[str]:
    """Those of our Pythons on which a distribution that states `requires_python` does not install."""
    return [python for python in pythons if requires_python and python not in SpecifierSet(requires_python)]


def test_each_pinned_distribution_that_is_here_installs_on_every_python_that_we_admit(pins: ModuleType) -> None:
    wanted, checked = pins.pins_of(ROOT / "constraints.txt"), 0
    pythons = pins.first_releases(ROOT / "pyproject.toml")
    refusing = {}
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if distribution.version.partition("+")[0] == wanted.get(name):
            checked += 1
            if found := refused(distribution.metadata["Requires-Python"], pythons):
                refusing[f"{name} {distribution.version}"] = found
    assert refusing == {}
    assert checked > 100, "most pinned distributions are installed where the tests run"


@pytest.mark.parametrize(
    ("requires_python", "found"),
    [(">=3.11.5", ["3.11.0"]), (">=3.9", []), (None, []), (">=3.12", ["3.11.0"]), ("!=3.12.*,>=3.10", ["3.12.0"])],
)
def test_a_python_that_is_refused_is_named(requires_python: str | None, found: list[str]) -> None:
    assert refused(requires_python, ["3.11.0", "3.12.0", "3.13.0"]) == found


def a_wheel(folder: Path, name: str, tag: str = "py3-none-any", requires: str = ">=3.9", needs: str = "") -> None:
    """Write a wheel of version 1.0 that has only metadata."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", f"Requires-Python: {requires}"]
    files = {
        "METADATA": "\n".join([*lines, *([f"Requires-Dist: {needs}"] if needs else []), ""]),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: {tag}\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{name}-1.0.dist-info/{file}", text)


@pytest.mark.parametrize(
    ("wheel", "pinned", "faults"),
    [
        ({}, "a==1.0", []),
        ({"requires": ">=3.11.5"}, "a==1.0", ["Python 3.11.0 on x86_64", ">=3.11.5"]),
        ({"tag": "cp311-cp311-manylinux_2_28_x86_64"}, "a==1.0", ["Python 3.12.0 on x86_64", "a==1.0"]),
        ({"tag": "py3-none-manylinux_2_39_x86_64"}, "a==1.0", ["Python 3.11.0 on x86_64", "manylinux_2_39"]),
        ({"needs": "b"}, "a==1.0", ["b 1.0 is needed and not pinned"]),
        ({"needs": "b>=2"}, "a==1.0\nb==1.0", ["b>=2"]),
        ({}, "a==1.0\nb==1.0", ["b is pinned and not needed"]),
    ],
    ids=["sound", "refuses a python", "no wheel for a python", "newer libraries", "unpinned", "contradicts", "useless"],
)
def test_a_pin_that_does_not_install_is_named(
    pins: ModuleType,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    wheel: dict[str, str],
    pinned: str,
    faults: list[str],
) -> None:
    pytest.importorskip("uv")
    monkeypatch.setattr(pins, "PLATFORMS", pins.PLATFORMS[:1])
    a_wheel(tmp_path, "a", **wheel)
    a_wheel(tmp_path, "b")
    project, constraints = tmp_path / "pyproject.toml", tmp_path / "constraints.txt"
    project.write_text(
        '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11,<3.13"\n'
        '[project.optional-dependencies]\nx = ["a"]\n'
    )
    constraints.write_text(f"# ours\n{pinned}\n")
    options = ["--no-index", "--find-links", str(tmp_path), "--cache-dir", str(tmp_path_factory.getbasetemp() / "uv")]
    found = pins.check(project, constraints, options)
    assert bool(found) == bool(faults)
    assert all(fault in "\n".join(found) for fault in faults), found
