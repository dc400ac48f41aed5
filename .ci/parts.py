"""Run every part of CI, whatever the others say, and end with a table.

usage: python3 .ci/parts.py [NAME=COMMAND ...]     without arguments: the parts of PARTS

Exits with 1 if a part that decides failed or did not run. Status NOT_HERE says that this machine cannot run a part.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/ci"
TOOLS = FOLDER / "tools"
NOT_HERE = 77
"""Exit status of a part that this machine cannot run, as in Automake's tests."""
PAUSE_S = 20
"""Seconds before a second try to fetch."""
SIDE_BY_SIDE_FROM = 8
"""Cores from which on other parts run beside the tests, with half of the cores each."""
WORK, WORK_S = "sum(n * n % 7 for n in range(4_000_000))", 0.35
"""A piece of work, and the seconds that it takes as a process on each core of a quiet machine (2 cores, 2026-11)."""


@dataclass(frozen=True)
class Part:
    """A command, and the seconds that it may take on a quiet machine; far more than it needs, since it is for hangs."""

    name: str
    command: str
    limit_s: float
    only_x86_linux: bool = False
    decides: bool = True
    """Is CI red if it fails? Otherwise the table alone tells it."""
    fetches: bool = False
    """It asks registries, which may be away for a moment: if it fails before it ran a test, it runs once more."""


@dataclass(frozen=True)
class Row:
    """How a part ended: `passed`, `failed`, `ended` at its limit, `not here` or `not run`."""

    name: str
    how: str
    seconds: float = 0.0
    tests: int | None = None
    failed: int = 0
    skipped: int = 0
    decides: bool = True


FIRST = (
    Part("tools", ".ci/tools", 600, decides=False),
    Part("set-up", "make -s ready", 1800),
    Part("engines", "make -s engines", 1800, only_x86_linux=True, fetches=True),
)
"""Downloads and installations, side by side: pip keeps one core busy."""

TESTS = (Part("test", "make test", 3600),)

OTHERS = (
    Part("pins", "make -s pins", 300, fetches=True),
    Part("bandit", "make -s bandit", 600),
    Part("kernels", "make kernels", 1800, only_x86_linux=True),
    Part("fuzz", "make fuzz", 900),
    Part("models", "make -s models OF=smollm2", 900, decides=False),
    Part(
        "pythons",
        f"{sys.executable} .ci/pythons.py tests/policies/sla tests/policies/test_rules.py tests/tls tests/http1"
        " tests/contracts",
        900,
        fetches=True,
    ),
)


def slowness() -> float:
    """How many times longer than on a quiet machine a fixed piece of work takes here and now, at least 1."""
    began = time.monotonic()
    works = [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(os.cpu_count() or 1)]
    for work in works:
        work.wait()
    return max(1.0, (time.monotonic() - began) / WORK_S)


def wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether the process ended by itself. Its limit grows with the time that a fixed piece of work takes meanwhile."""
    began = time.monotonic()
    while process.poll() is None:
        try:
            process.wait(max(0.0, began + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            if time.monotonic() - began >= limit_s * slowness():
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return False
    return True


def counts_of(folder: Path) -> tuple[int | None, int, int]:
    """Tests, failed ones and skipped ones in the accounts of a part's runs; the first is None if it ran no tests."""
    tests, failed, skipped = None, 0, 0
    for file in folder.glob("*.json"):
        if not file.stem.endswith("-again"):
            first = json.loads(file.read_text())
            again = file.with_name(f"{file.stem}-again.json")
            skipped_here = sum(count for _, _, count in first["skipped"])
            tests = (tests or 0) + first["passed"] + len(first["failed"]) + skipped_here
            skipped += skipped_here
            failed += len((json.loads(again.read_text()) if again.exists() else first)["failed"])
    return tests, failed, skipped


def run(part: Part, workers: int | None = None, *, quiet: bool = False) -> Row:
    """Run a part, and once more if it could not fetch what it needs. See `run_once`."""
    row = run_once(part, workers, quiet=quiet)
    if not part.fetches or row.how != "failed" or row.tests is not None:
        return row
    print(f"== {part.name} failed before it ran a test: once more, in {PAUSE_S} s", flush=True)
    time.sleep(PAUSE_S)
    again = run_once(part, workers, quiet=quiet)
    return replace(again, seconds=row.seconds + again.seconds)


def run_once(part: Part, workers: int | None, *, quiet: bool) -> Row:
    """Run a part. One that is `quiet` writes into a log, which is printed when it has ended."""
    if part.only_x86_linux and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return Row(part.name, "not here")
    accounts, log = FOLDER / "accounts" / part.name, FOLDER / f"{part.name}.log"
    shutil.rmtree(accounts, ignore_errors=True)
    accounts.mkdir(parents=True)
    path = f"{TOOLS / 'bin'}{os.pathsep}{TOOLS / 'usr/bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "ACCOUNTS": str(accounts), "TOOLS": str(TOOLS), "PATH": path}
    if workers is not None:
        environment["PYTEST_XDIST_AUTO_NUM_WORKERS"] = str(workers)
    print(f"== {part.name}: {part.command}", flush=True)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", part.command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output if quiet else None,
            stderr=subprocess.STDOUT if quiet else None,
            start_new_session=True,
        )
        in_time = wait(process, part.limit_s)
    seconds = time.monotonic() - began
    if quiet:
        print(f"== output of {part.name}\n{log.read_text(errors='replace')}", flush=True)
    how = {0: "passed", NOT_HERE: "not here"}.get(process.returncode, "failed") if in_time else "ended"
    return Row(part.name, how, seconds, *counts_of(accounts), decides=part.decides)


def run_beside(lanes: Sequence[Sequence[Part]], workers: int | None = None) -> list[Row]:
    """Run the lanes side by side, and the parts of each one after the other. The first lane prints as it goes."""
    rows: dict[str, Row] = {}

    def go(lane: Sequence[Part], quiet: bool) -> None:
        for part in lane:
            rows[part.name] = run(part, workers, quiet=quiet)

    threads = [threading.Thread(target=go, args=(lane, number > 0)) for number, lane in enumerate(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[part.name] for lane in lanes for part in lane]


def all_parts() -> list[Row]:
    """Set up, test, and all the rest; what needs the set-up does not run without it."""
    rows = run_beside([[part] for part in FIRST])
    if any(row.name == "set-up" and row.how != "passed" for row in rows):
        return [*rows, *(Row(part.name, "not run") for part in (*TESTS, *OTHERS))]
    cores = os.cpu_count() or 1
    if cores >= SIDE_BY_SIDE_FROM:
        return rows + run_beside([TESTS, OTHERS], cores // 2)
    return rows + run_beside([[*TESTS, *OTHERS]])


def table(rows: list[Row]) -> str:
    """The rows, and a last line with the sums of tests."""
    lines = [f"{'part':10} {'status':8} {'seconds':>8} {'tests':>7} {'skipped':>8}"]
    for row in rows:
        tests, skipped = ("", "") if row.tests is None else (str(row.tests), str(row.skipped))
        lines.append(f"{row.name:10} {row.how:8} {row.seconds:8.0f} {tests:>7} {skipped:>8}".rstrip())
    failed, left_out = sum(row.failed for row in rows), sum(row.skipped for row in rows)
    passed = sum(row.tests or 0 for row in rows) - failed - left_out
    return "\n".join([*lines, f"{passed} passed, {failed} failed, {left_out} skipped"])


def main(arguments: list[str]) -> int:
    """The worst status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    named = [Part(name, command, 3600) for name, _, command in (argument.partition("=") for argument in arguments)]
    rows = run_beside([named]) if named else all_parts()
    print(f"\n{table(rows)}", flush=True)
    return 0 if all(row.how in ("passed", "not here") for row in rows if row.decides) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
