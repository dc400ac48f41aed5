"""A quick look at a change: ruff, imports, and the tests of what changed and of the modules that import it.

usage: VENV/bin/python .ci/quick.py [COMMIT]     by default what changed since the branch left main, or since HEAD

A file of code is tested by the file of the same name in the mirrored folder below tests/, or else by that folder; a
module that imports it, by its own file of tests. A changed page is checked for its links, words and blocks. Tests that
start other programs, and slow ones, are left to `make test`.
"""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("http1", "tls", "policies", "shards", "backends", "router", "simulation")
LEFT_OUT = (
    "chaos",
    "clients",
    "docs",
    "e2e",
    "engines",
    "examples",
    "fuzz",
    "helm",
    "late_gpu",
    "shards/gpu",
    "shards/kernels",
)
ALWAYS = ["tests/house/test_imports.py", "tests/house/test_names.py"]
ABOUT = {
    "*.md": ["tests/house/test_documents.py", "tests/house/test_words.py", "tests/docs/test_blocks.py"],
    "pyproject.toml": ["tests/house/test_pins.py"],
    "constraints.txt": ["tests/house/test_pins.py"],
}
"""Pattern of changed files -> what looks at them, besides the tests of code."""

MOST = 40
"""Files of tests that run, at most: two minutes on two cores."""


def git(*arguments: str) -> str:
    """What git prints; empty if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def changed_since(commit: str) -> set[str]:
    """Files that differ from a commit, and files that git does not know yet."""
    lines = (
        git("diff", "--name-only", "--diff-filter=d", commit) + "\n" + git("ls-files", "--others", "--exclude-standard")
    )
    return {line for line in lines.splitlines() if line}


def imports_of(source: str) -> set[str]:
    """Modules that a source imports; for `from a import b` both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def module_of(file: str) -> str:
    """router/call/pipeline.py -> router.call.pipeline"""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def importers(changed: Iterable[str], sources: dict[str, str]) -> set[str]:
    """Files of code that import a changed one themselves: one step."""
    modules = {module_of(file) for file in changed}
    return {file for file, source in sources.items() if imports_of(source) & modules}


def mirrored(file: str) -> Path:
    """The file of tests for a file of code: router/call/pipeline.py -> tests/router/call/test_pipeline.py"""
    path = Path(file)
    return Path("tests") / path.parent / f"test_{path.stem}.py"


def tests_for(changed: set[str], sources: dict[str, str], tests: set[str]) -> list[str]:
    """Files and folders of tests, of those in `tests`, for changed files; the folder where no file has the name."""
    wanted = {file for file in changed if file in tests}
    code = {file for file in changed if file in sources}
    for file in code:
        mirror = mirrored(file)
        if str(mirror) in tests:
            wanted.add(str(mirror))
        else:
            wanted |= {test for test in tests if Path(test).parent == mirror.parent}
    wanted |= {str(mirrored(file)) for file in importers(code, sources)} & tests
    # parts that tests share: the tests beside them
    for file in changed:
        if file.startswith("tests/") and file.endswith(".py") and file not in tests:
            wanted |= {test for test in tests if Path(test).parent == Path(file).parent}
    for pattern, files in ABOUT.items():
        if any(fnmatchcase(file, pattern) for file in changed):
            wanted |= set(files)
    return sorted(wanted)


def bounded(tests: list[str], changed: set[str]) -> tuple[list[str], int]:
    """The first MOST files of tests, those of what changed before those of importers, and the number of all others."""
    own = {str(mirrored(file)) for file in changed} | changed
    ordered = sorted(tests, key=lambda test: test not in own)
    return ordered[:MOST], len(ordered[MOST:])


def main(arguments: list[str]) -> int:
    """The worst status."""
    base = arguments[0] if arguments else git("merge-base", "HEAD", "main") or "HEAD"
    changed = changed_since(base)
    sources = {str(file.relative_to(ROOT)): file.read_text() for name in CODE for file in (ROOT / name).rglob("*.py")}
    left_out = tuple(f"tests/{folder}/" for folder in LEFT_OUT)
    found = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    began = time.monotonic()
    every = tests_for(changed, sources, {file for file in found if not file.startswith(left_out)})
    tests, more = bounded(every, changed)
    print(
        f"{len(changed)} files changed since {base[:12]}: {len(tests)} files of tests, and {more} left out", flush=True
    )
    python = [sys.executable, "-m"]
    statuses = [
        subprocess.run([*python, *command], cwd=ROOT, check=False).returncode
        for command in (
            ["ruff", "check", "."],
            ["ruff", "format", "--check", "-q", "."],
            [
                *("pytest", "-p", "no:cacheprovider", "-n", "auto", "--dist", "loadfile", "-m", "not slow"),
                *dict.fromkeys([*ALWAYS, *tests]),
            ],
        )
    ]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, cores = used.ru_utime + used.ru_stime, os.cpu_count() or 1
    print(f"{time.monotonic() - began:.0f} s, with {cpu_s:.0f} s of CPU: {cpu_s / cores:.0f} s of all {cores} cores")
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
