"""Install and test on the oldest and the newest Python of this machine, besides the one that runs all tests.

usage: python3 .ci/pythons.py [TESTS ...]     by default all tests that need no torch

Each has an environment of its own. The oldest begins with the pip of Debian 12, the newest with that of Ubuntu 26.04.
PYTHONS, like "3.11 3.14", names Pythons that must be there. Exits with 77 if there is none but the one that runs this.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pins import first_releases

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [
    f"tests/{name}" for name in ("policies", "router", "simulation", "http1", "tls", "backends", "contracts", "shards")
]
NOT_HERE = 77
OLDEST_PIP, NEWEST_PIP = "23.0.1", "25.1.1"
Version = tuple[int, ...]


def version_of(python: Path) -> Version | None:
    """The version of an interpreter; None if it does not run."""
    ask = [str(python), "-c", "import sys, venv; print(*sys.version_info[:3])"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 and done.stdout else None


def places() -> list[Path]:
    """Folders with interpreters: those of PATH, of Debian's packages and of pyenv."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    named = [Path(place) for place in os.environ.get("PATH", "").split(os.pathsep) if place]
    return [*named, Path("/usr/bin"), *sorted(of_pyenv.glob("*/bin"))]


def pythons(admitted: Iterable[str], folders: Iterable[Path]) -> dict[Version, Path]:
    """Version -> interpreter, of all that the project admits, like 3.11.0."""
    names = {"python" + release.rpartition(".")[0] for release in admitted}
    found: dict[Version, Path] = {}
    for folder in folders:
        for python in sorted(folder / name for name in names):
            if python.is_file() and (version := version_of(python)):
                found.setdefault(version, python)
    return dict(sorted(found.items()))


def to_run(found: dict[Version, Path], running: Version) -> list[Version]:
    """The oldest and the newest one, without the one that runs all tests."""
    return [version for version in dict.fromkeys([*list(found)[:1], *list(found)[-1:]]) if version != running]


def environment(version: Version, python: Path, pip: str) -> Path:
    """The interpreter of an environment with what the tests need, made anew if the versions to install changed."""
    folder = ROOT / f".venv-{'.'.join(map(str, version))}"
    ready = folder / ".ready"
    wanted = [ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / ".ci/install.py"]
    if not ready.exists() or any(file.stat().st_mtime > ready.stat().st_mtime for file in wanted):
        print(f"Setting up {folder.name}, once, beginning with pip {pip} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        here = folder / "bin/python"
        subprocess.run([here, "-m", "pip", "install", "-q", f"pip=={pip}"], check=True)
        subprocess.run([here, ".ci/install.py", "-e", ".[tests]"], cwd=ROOT, check=True)
        ready.touch()
    return folder / "bin/python"


def main(tests: list[str]) -> int:
    """The worst status."""
    found = pythons(first_releases(ROOT / "pyproject.toml"), places())
    minors = {version[:2] for version in found}
    required = [tuple(map(int, minor.split("."))) for minor in re.findall(r"3\.\d+", os.environ.get("PYTHONS", ""))]
    if missing := [minor for minor in required if minor not in minors]:
        print("missing: " + ", ".join("Python " + ".".join(map(str, minor)) for minor in missing))
        return 1
    versions = to_run(found, sys.version_info[:3])
    print("Python here: " + ", ".join(".".join(map(str, version)) for version in found), flush=True)
    if not versions:
        print("There is no other Python than the one that runs all tests.")
        return NOT_HERE
    statuses = []
    for version in versions:
        pip = NEWEST_PIP if version == list(found)[-1] else OLDEST_PIP
        name = ".".join(map(str, version))
        command = [str(environment(version, found[version], pip)), "-m", "pytest", "--without-torch", "-n", "auto"]
        command += ["--dist", "loadfile", "-r", "fE", "-p", "no:cacheprovider"]
        command += [f"--account={ROOT / os.environ.get('ACCOUNTS', 'build/accounts')}/python-{name}.json"]
        command += tests or ["--at-least", "5000", *FOLDERS, "tests/house/test_imports.py"]
        print(f"Python {name}:", flush=True)
        statuses.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
