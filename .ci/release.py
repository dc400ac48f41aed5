"""Build what a release consists of, into build/release, and try it.

usage: VENV-release/bin/python .ci/release.py [TAG]

- the wheel and the source distribution; a second wheel, built from the source distribution, must be the same bytes
- pointsman-VERSION.cdx.json: a software bill of materials (CycloneDX 1.6) of the wheel, installed at the versions of
  constraints.txt. In that installation the command starts, accepts our examples, and needs no torch
- SHA256SUMS: the hashes of all these files, as `sha256sum --check` reads them

With a TAG, like v0.1.0, pyproject.toml must have that version, and CHANGELOG.md a section with a date for it.
Exits with 1 and a reason if one of these is not so. .github/workflows/release.yml signs and uploads.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from install import CONSTRAINTS

ROOT = Path(__file__).resolve().parent.parent


class NotReady(Exception):
    """Why this tree cannot be released."""


def version(tag: str | None, project: str, changelog: str) -> str:
    """The version in pyproject.toml's text. Raises NotReady if the tag has another, or the changelog no date for it."""
    stated = tomllib.loads(project)["project"]["version"]
    if tag is None:
        return str(stated)
    if tag != f"v{stated}":
        raise NotReady(f"the tag is {tag}, and pyproject.toml has version {stated}: the tag of it is v{stated}")
    if not re.search(rf"^## {re.escape(stated)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise NotReady(
            f"CHANGELOG.md has no section '## {stated} (YYYY-MM-DD)': replace '(unreleased)' by the day of the release"
        )
    return str(stated)


def sums(folder: Path) -> str:
    """The SHA-256 of each file in the folder, in order of the names, as sha256sum writes them."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def build(target: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution, dated by the last commit. Raises NotReady if a second wheel differs."""
    last_commit = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    environment = {**os.environ, "SOURCE_DATE_EPOCH": last_commit.stdout.strip()}
    package = [sys.executable, "-m", "build", "--quiet", "--outdir"]
    # a tree of the commit alone: no file that is not committed, or was built before, comes along. The umask is that of
    # unpack_archive below, since a wheel keeps the permissions of its files
    with tempfile.TemporaryDirectory() as tree:
        archive = subprocess.run(
            ["git", "-c", "tar.umask=0022", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        subprocess.run([*package, target, "--sdist", tree], env=environment, check=True, stdout=subprocess.DEVNULL)
        (source,) = target.glob("*.tar.gz")
        with tempfile.TemporaryDirectory() as second:
            subprocess.run([*package, target, "--wheel", tree], env=environment, check=True, stdout=subprocess.DEVNULL)
            shutil.unpack_archive(source, second, filter="data")
            unpacked = Path(second) / source.name.removesuffix(".tar.gz")
            subprocess.run(
                [*package, second, "--wheel", unpacked], env=environment, check=True, stdout=subprocess.DEVNULL
            )
            (wheel,) = target.glob("*.whl")
            if wheel.read_bytes() != (Path(second) / wheel.name).read_bytes():
                raise NotReady(f"{wheel.name} is not the same when it is built from {source.name}")
    return wheel, source


def install(wheel: Path, environment: Path) -> Path:
    """A new virtual environment with the wheel and what it needs alone; its Python."""
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *CONSTRAINTS, str(wheel)], check=True, stdout=subprocess.DEVNULL)
    return python


def try_it(python: Path, stated: str) -> None:
    """Run the installed command outside of the source tree. Raises NotReady if it does not work."""
    command = python.with_name("pointsman")
    with tempfile.TemporaryDirectory() as elsewhere:
        shown = subprocess.run([command, "--version"], cwd=elsewhere, capture_output=True, text=True, check=False)
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        if shown.stdout.strip() != f"pointsman {stated} ({commit[:12]})":
            raise NotReady(f"`pointsman --version` printed {shown.stdout!r}, not {stated} and {commit}; {shown.stderr}")
        for example in sorted((ROOT / "examples").glob("*.yaml")):
            check = [str(command), "check", "--without-secrets", str(example)]
            checked = subprocess.run(check, cwd=elsewhere, capture_output=True, text=True, check=False)
            if checked.returncode:
                raise NotReady(f"the installed command refuses {example.name}: {checked.stdout}{checked.stderr}")
        if not subprocess.run(
            [python, "-c", "import torch"], cwd=elsewhere, capture_output=True, check=False
        ).returncode:
            raise NotReady("the wheel alone installs torch: a router needs none")


def main(tag: str | None) -> int:
    """The exit status."""
    target = ROOT / "build/release"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    try:
        stated = version(tag, (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text())
        print("Building the wheel twice, and the source distribution ...", flush=True)
        wheel, source = build(target)
        subprocess.run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, source], check=True)
        with tempfile.TemporaryDirectory() as folder:
            print("Installing the wheel alone, and trying it ...", flush=True)
            python = install(wheel, Path(folder) / "venv")
            try_it(python, stated)
            subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "uninstall", "-qy", "pip"], check=True)
            bom = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--sv", "1.6"]
            project = ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"]
            subprocess.run([*bom, *project, "-o", target / f"pointsman-{stated}.cdx.json", python], check=True)
    except NotReady as reason:
        print(f"Not ready: {reason}", file=sys.stderr)
        return 1
    (target / "SHA256SUMS").write_text(sums(target))
    print(f"{target.relative_to(ROOT)}:\n{(target / 'SHA256SUMS').read_text()}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
