"""Run all tests, those that fail once more, and compare what ran with what this machine should run.

usage: VENV/bin/python .ci/suite.py

The environment variables are ENGINES, a folder with the environment of tests/engines, and ACCOUNTS, a folder for what
each run did. Exits with 0 if every test ran and passed, or passed alone, as tests/expected.yaml allows; else with 1.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
ACCOUNTS = ROOT / os.environ.get("ACCOUNTS", "build/accounts")
# The order is that of tests/conftest.py: long files first, so that no worker ends with one of them alone.
ALL = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "--ignore", "tests/engines", "tests"]
# By themselves, in two groups (tests/engines/conftest.py): a real engine keeps a core busy for half a minute.
ENGINES = ["-n", "2", "tests/engines"]
MOST_AGAIN = 25
"""Failed tests that run a second time, at most: more are a defect, and no late process."""


@dataclass
class Account:
    """What tests/account.py wrote about one run."""

    status: int
    passed: int
    failed: list[str]
    skipped: list[tuple[str, str, int]]
    files: list[str]

    @property
    def tests(self) -> int:
        """Tests that passed, failed or were skipped."""
        return self.passed + len(self.failed) + sum(count for _, _, count in self.skipped)


@dataclass
class Result:
    """A run of some tests, with the second run of those that failed."""

    account: Account | None
    flaky: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def run(name: str, arguments: list[str]) -> tuple[int, Account | None]:
    """Pytest's exit status, and its account if it came to its end."""
    file = ACCOUNTS / f"{name}.json"
    file.unlink(missing_ok=True)
    # no cache of an earlier run decides what runs
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--account={file}", *arguments]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return status, Account(**json.loads(file.read_text())) if file.exists() else None


def twice(name: str, arguments: list[str], run: Callable[[str, list[str]], tuple[int, Account | None]] = run) -> Result:
    """Run tests, and those that failed once more, alone.

    Many run real processes and sockets side by side, so that one may be late on a busy machine; a defect fails alone
    too. The second run follows only a first one that came to its end, and has that one's list.
    """
    status, account = run(name, arguments)
    if account is None or status not in (0, 1) or status != account.status:
        return Result(account, faults=[f"{name}: pytest ended with status {status} before all tests had run"])
    if status == 0:
        return Result(account)
    if not 0 < len(account.failed) <= MOST_AGAIN:
        return Result(account, faults=[f"{name}: {len(account.failed)} tests failed"])
    print(f"Once more, alone: {len(account.failed)} tests", flush=True)
    listed = ACCOUNTS / f"{name}-again.txt"
    listed.write_text("".join(f"{test}\n" for test in account.failed))
    status, again = run(f"{name}-again", ["-n", "0", f"@{listed}"])
    if status == 0 and again is not None and again.passed >= len(account.failed):
        return Result(account, flaky=account.failed)
    failed = again.failed if status == 1 and again is not None and again.failed else account.failed
    flaky = [test for test in account.failed if test not in failed]
    return Result(account, flaky, [f"{test}: failed, and failed again" for test in failed])


def is_here(thing: str) -> bool:
    """Whether there is a `program NAME`, `module NAME`, `file PATTERN`, `cpu FLAG`, `system NAME` or `user root`."""
    kind, _, name = thing.partition(" ")
    match kind:
        case "program":
            return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is not None
        case "module":
            return importlib.util.find_spec(name) is not None
        case "file":
            return bool(glob(os.path.expandvars(name.replace("$VENV", sys.prefix)), root_dir=ROOT))  # noqa: PTH207
        case "cpu":
            cpu = Path("/proc/cpuinfo")
            return not cpu.exists() or name in cpu.read_text().split()
        case "system":
            return sys.platform == name
        case "user":
            return os.geteuid() == 0
        case _:
            raise ValueError(thing)


def skipped_in_vain(account: Account, allowed: list[dict[str, Any]], is_here: Callable[[str], bool]) -> list[str]:
    """A line for each file with tests that this machine should have run."""
    found = []
    for file, reason, count in account.skipped:
        entry = next(
            (
                each
                for each in allowed
                if fnmatchcase(reason, each["reason"]) and fnmatchcase(file, each.get("in", "*"))
            ),
            None,
        )
        if entry is None:
            found.append(f"{file}: {count} skipped, for a reason that tests/expected.yaml does not have: {reason}")
        elif here := [thing for thing in entry.get("without", ()) if is_here(thing)]:
            found.append(f"{file}: {count} skipped though this machine has {', '.join(here)}: {reason}")
    return found


def not_forgiven(flaky: Iterable[str], listed: list[dict[str, Any]]) -> list[str]:
    """A line for each entry that more tests needed than it allows, and each test without an entry."""
    found, needed = [], Counter[int]()
    for test in flaky:
        for number, entry in enumerate(listed):
            if fnmatchcase(test.partition("[")[0], entry["tests"]):
                needed[number] += 1
                print(f"flaky: {test}\n    since {entry['since']}: {entry['reason']}")
                break
        else:
            found.append(
                f"{test}: failed beside other tests and passed alone, and tests/expected.yaml does not have it"
            )
    for number, count in needed.items():
        if count > (most := listed[number]["at_most"]):
            found.append(f"{listed[number]['tests']}: {count} passed only alone, {most} may")
    return found


def fits_one(file: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is for this file."""
    return any(fnmatchcase(file, pattern) for pattern in patterns)


def files_of_tests() -> set[str]:
    """All files of tests in the repository."""
    return {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}


def judge(results: dict[str, Result], expected: dict[str, Any]) -> list[str]:
    """All that makes these runs red, a line each."""
    accounts = {name: result.account for name, result in results.items() if result.account is not None}
    faults = [fault for result in results.values() for fault in result.faults]
    for name, least in expected["tests"].items():
        if name in accounts and accounts[name].tests < least:
            faults.append(f"{name}: {accounts[name].tests} tests, at least {least} are expected")
    if len(accounts) == len(results):
        ran = {file for account in accounts.values() for file in account.files}
        missing = [file for file in sorted(files_of_tests() - ran) if not fits_one(file, expected["elsewhere"])]
        faults += [f"{file}: no test of it ran" for file in missing]
    for account in accounts.values():
        faults += skipped_in_vain(account, expected["skipped"], is_here)
    flaky = [test for result in results.values() for test in result.flaky]
    return faults + not_forgiven(flaky, expected["flaky"])


def main() -> int:
    """1 if something was not as it should be, which is printed last."""
    expected = yaml.safe_load((ROOT / "tests/expected.yaml").read_text())
    ACCOUNTS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    results = {"all": twice("all", ALL), "engines": twice("engines", ENGINES)}
    faults = judge(results, expected)
    accounts = [result.account for result in results.values() if result.account is not None]
    flaky = sum(len(result.flaky) for result in results.values())
    reasons = Counter[str]()
    for account in accounts:
        for _, reason, count in account.skipped:
            reasons[reason] += count
    print(f"\n{sum(account.tests for account in accounts)} tests, {reasons.total()} skipped, {flaky} flaky:")
    used, wall_s, cores = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began, os.cpu_count() or 1
    share = (used.ru_utime + used.ru_stime) / (wall_s * cores)
    print(f"{wall_s:.0f} s, in which the tests used {share:.0%} of {cores} cores")
    for reason, count in reasons.most_common():
        print(f"{count:6} skipped: {reason}")
    for fault in faults:
        print(f"RED {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
