"""The version of this program, with the commit that it was built from."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_HERE = Path(__file__).parent
_DIGITS = 12


def version_text() -> str:
    """Version and commit, as `0.1.0 (a1b2c3d4e5f6)`; the version alone where nothing names the commit."""
    try:
        version = distribution("pointsman").version
    except PackageNotFoundError:
        # a copied tree that was not installed
        version = "0"
    commit = _archived() or _installed() or _checked_out()
    return f"{version} ({commit})" if commit else version


def _archived() -> str | None:
    """What `git archive` wrote into the file, as for a release, or the build of an image."""
    try:
        commit = (_HERE / "commit.txt").read_text().strip()
    except OSError:
        return None
    return commit[:_DIGITS] if commit and "$" not in commit else None


def _installed() -> str | None:
    """What pip recorded of an installation from a repository (PEP 610)."""
    try:
        recorded = json.loads(distribution("pointsman").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    commit = recorded.get("vcs_info", {}).get("commit_id")
    return str(commit)[:_DIGITS] if commit else None


def _checked_out() -> str | None:
    """The commit of a clone, with `-dirty` if files have changed since; None elsewhere, or without git."""
    if not (_HERE.parent / ".git").exists():
        return None
    describe = ["git", "-C", str(_HERE.parent), "describe", "--always", "--dirty", "--exclude=*", f"--abbrev={_DIGITS}"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603  # nosec B603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
