"""Check that what the project needs installs, at the versions of constraints.txt, on each Python that it admits.

usage: VENV/bin/python .ci/pins.py [CONSTRAINTS]

uv resolves all extras from the registry's metadata, which it caches, and downloads no package: for the first release of
each Python, on Debian 12's glibc, which is the oldest one, and from wheels alone. Exits with 1 if a package refuses a
Python or has no wheel for it, if two contradict each other, if a package is not pinned, or if a pin is not needed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("x86_64-manylinux_2_36", "aarch64-manylinux_2_36")
UNPINNED = ("cuda-", "nvidia-", "triton")
"""Beginnings of the names of packages whose versions torch's CUDA build states itself."""
APART = frozenset({"clients"})
"""Extras of environments apart, whose newest versions are tested."""
MINORS = range(11, 30)


def name_of(requirement: str) -> str:
    """The name of a line like `Flask==3.1.3 ; marker`, as registries compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def pins_of(constraints: Path) -> dict[str, str]:
    """Distribution -> its version."""
    lines = constraints.read_text().splitlines()
    return {name_of(line): line.partition("==")[2] for line in lines if re.match(r"[\w.-]+==", line)}


def first_releases(project: Path) -> list[str]:
    """The first release of each Python that the project admits: what Debian has is seldom the last one."""
    admitted = tomllib.loads(project.read_text())["project"]["requires-python"]
    least, below = (int(minor) for minor in re.fullmatch(r">=3\.(\d+),<3\.(\d+)", admitted).groups())  # type: ignore[union-attr]
    return [f"3.{minor}.0" for minor in range(least, below)]


def extras_of(project: Path) -> list[str]:
    """Names of all extras."""
    return list(tomllib.loads(project.read_text())["project"].get("optional-dependencies", {}))


def environment() -> dict[str, str]:
    """uv asks the registry that pip asks."""
    asked = os.environ.get("PIP_INDEX_URL")
    return {**({"UV_DEFAULT_INDEX": asked} if asked else {}), **os.environ}


def resolved(
    project: Path, constraints: Path, python: str, platform: str, extras: Iterable[str], options: Iterable[str] = ()
) -> dict[str, str] | str:
    """Distribution -> its version, or what uv says if they cannot be installed together."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-header", "--no-annotate", str(project)]
    command += ["-c", str(constraints), "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", platform, *options]
    command += [part for extra in extras for part in ("--extra", extra)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip()
    lines = done.stdout.splitlines()
    return {name_of(line): line.partition("==")[2].split(" ")[0] for line in lines if "==" in line}


def faults_of(found: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """Packages that are needed and not pinned."""
    return [
        f"{name} {version} is needed and not pinned"
        for name, version in found.items()
        if name not in pins and not name.startswith(UNPINNED)
    ]


def check(project: Path, constraints: Path, options: Iterable[str] = ()) -> list[str]:
    """What does not install or is not pinned, a line each."""
    pins, needed, faults = pins_of(constraints), set[str](), list[str]()
    extras = extras_of(project)
    for python in first_releases(project):
        for platform in PLATFORMS:
            where = f"Python {python} on {platform}"
            found = resolved(project, constraints, python, platform, [e for e in extras if e not in APART], options)
            if isinstance(found, str):
                faults.append(f"{where}: {found}")
                continue
            needed |= found.keys()
            faults += [f"{where}: {fault}" for fault in faults_of(found, pins)]
        if apart := [extra for extra in extras if extra in APART]:
            found = resolved(project, constraints, python, PLATFORMS[0], apart, options)
            faults += [f"Python {python}, {', '.join(apart)}: {found}"] if isinstance(found, str) else []
            needed |= found.keys() if not isinstance(found, str) else set()
    if not faults:
        faults = [f"{name} is pinned and not needed" for name in pins if name not in needed]
    return faults


def main(arguments: list[str]) -> int:
    """1 if something does not install."""
    constraints = Path(arguments[0]) if arguments else ROOT / "constraints.txt"
    faults = check(ROOT / "pyproject.toml", constraints)
    for fault in faults:
        print(fault)
    if not faults:
        print(
            f"{len(pins_of(constraints))} pins install on Python {', '.join(first_releases(ROOT / 'pyproject.toml'))}"
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
