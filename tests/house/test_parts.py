"""`.ci/run` runs every part whatever the others say, and ends with a table."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    module = import_module("parts")
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "PAUSE_S", 0)
    return module


def of(passed: int, failed: int = 0, skipped: int = 0) -> str:
    """A shell command that leaves the account of a run with so many tests, as a part of CI does."""
    account = {"passed": passed, "failed": ["x"] * failed, "skipped": [["f", "r", skipped]] if skipped else []}
    return f"echo '{json.dumps(account)}'"


def test_each_part_runs_and_the_worst_status_counts(
    parts: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = [
        f"first={of(7, 1, 2)} >$ACCOUNTS/all.json; {of(0, 1)} >$ACCOUNTS/all-again.json; exit 1",
        "second=kill -9 $$",
        "third=exit 77",
        f"fourth={of(5, 1, 1)} >$ACCOUNTS/all.json; {of(1)} >$ACCOUNTS/all-again.json",
        f"fifth=touch {tmp_path}/fifth",
    ]
    assert parts.main(commands) == 1
    assert (tmp_path / "fifth").exists()
    table = [re.sub(r"\s+\d+", " S", line, count=1).split() for line in capfd.readouterr().out.splitlines()[-6:-1]]
    assert table == [
        ["first", "failed", "S", "10", "2"],
        ["second", "failed", "S"],
        ["third", "not", "here", "S"],
        ["fourth", "passed", "S", "7", "1"],
        ["fifth", "passed", "S"],
    ]


def test_the_table_ends_with_the_sums_of_all_tests(parts: ModuleType) -> None:
    rows = [
        parts.Row("a", "failed", 1.0, 10, 1, 2),
        parts.Row("b", "passed", 2.0),
        parts.Row("c", "passed", 3.0, 5, 0, 1),
    ]
    assert parts.table(rows).splitlines()[-1] == "11 passed, 1 failed, 3 skipped"


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("exit 77", 0), ("false", 1), ("exit 2", 1)])
def test_only_failures_are_red(parts: ModuleType, command: str, status: int) -> None:
    assert parts.main([f"part={command}"]) == status


def test_a_part_that_hangs_is_ended_with_its_programs_and_the_next_one_runs(
    parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, kept = os.pipe()
    os.set_inheritable(kept, True)
    monkeypatch.setattr("subprocess.Popen", functools.partial(subprocess.Popen, pass_fds=[kept]))
    started = tmp_path / "started"

    def slowness() -> float:
        while not started.exists():
            time.sleep(0.01)
        return 0.0

    monkeypatch.setattr(parts, "slowness", slowness)
    hanging = parts.Part("hanging", f"sleep 600 & touch {started}; wait", 0.0)
    rows = parts.run_beside([[hanging, parts.Part("next", "true", 60.0)]])
    assert [row.how for row in rows] == ["ended", "passed"]
    os.close(kept)
    assert os.read(gone, 1) == b"", "the last holder of the other end, `sleep`, is gone"
    os.close(gone)


def test_nothing_runs_without_a_set_up_and_all_of_it_is_listed(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "FIRST", (parts.Part("tools", "true", 60), parts.Part("set-up", "false", 60)))
    assert parts.main([]) == 1
    shown = capfd.readouterr().out
    for part in (*parts.TESTS, *parts.OTHERS):
        assert re.search(rf"^{part.name} +not run", shown, re.MULTILINE)


def test_what_runs_beside_the_tests_is_printed_when_it_has_ended(
    parts: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    lanes = [
        [parts.Part("a", "echo of a", 60)],
        [parts.Part("b", "echo of b; echo $PYTEST_XDIST_AUTO_NUM_WORKERS", 60)],
    ]
    assert [row.name for row in parts.run_beside(lanes, 4)] == ["a", "b"]
    assert "== output of b\nof b\n4\n" in capfd.readouterr().out


def test_a_machine_that_takes_longer_for_its_work_is_slower(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WORK", "pass")
    monkeypatch.setattr(parts, "WORK_S", 1e-6)
    assert parts.slowness() > 1
    monkeypatch.setattr(parts, "WORK_S", 1e6)
    assert parts.slowness() == 1.0


def test_the_table_shows_a_part_that_failed_beside_those_that_passed_and_did_not_run(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "FIRST", (parts.Part("set-up", "true", 60),))
    monkeypatch.setattr(parts, "TESTS", (parts.Part("test", f"{of(3, 1)} >$ACCOUNTS/all.json; exit 1", 60),))
    monkeypatch.setattr(parts, "OTHERS", (parts.Part("bandit", "true", 60), parts.Part("kernels", "exit 77", 60)))
    assert parts.main([]) == 1
    shown = capfd.readouterr().out
    table = [re.sub(r" +", " ", line) for line in shown[shown.index("part ") :].splitlines()]
    assert table == [
        "part status seconds tests skipped",
        "set-up passed 0",
        "test failed 0 4 0",
        "bandit passed 0",
        "kernels not here 0",
        "3 passed, 1 failed, 0 skipped",
    ]


@pytest.mark.parametrize(
    ("fetches", "first", "second", "how", "runs"),
    [
        (True, "exit 1", "true", "passed", 2),
        (True, "exit 1", "exit 2", "failed", 2),
        (True, f"{of(0, 1)} >$ACCOUNTS/all.json; exit 1", "true", "failed", 1),
        (True, "exit 77", "true", "not here", 1),
        (False, "exit 1", "true", "failed", 1),
    ],
)
def test_a_part_that_could_not_fetch_what_it_needs_runs_once_more_and_no_failed_test_is_forgiven(
    parts: ModuleType, tmp_path: Path, fetches: bool, first: str, second: str, how: str, runs: int
) -> None:
    seen = tmp_path / "seen"
    command = f"echo >>{seen}; if [ $(wc -l <{seen}) = 1 ]; then {first}; else {second}; fi"
    row = parts.run(parts.Part("part", command, 60, fetches=fetches))
    assert (row.how, seen.read_text().count("\n")) == (how, runs)


def test_parts_that_ask_registries_decide_and_may_run_twice(parts: ModuleType) -> None:
    every = {part.name: part for part in (*parts.FIRST, *parts.TESTS, *parts.OTHERS)}
    assert {name for name, part in every.items() if part.fetches} == {"engines", "pins", "pythons"}
    assert {name for name, part in every.items() if not part.decides} == {"tools", "models"}


def test_a_part_that_is_told_does_not_decide(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [parts.Row("test", "passed"), parts.Row("pins", "failed", decides=False)]
    monkeypatch.setattr(parts, "all_parts", lambda: rows)
    assert parts.main([]) == 0
    assert "pins       failed" in capsys.readouterr().out
    monkeypatch.setattr(parts, "all_parts", lambda: [*rows, parts.Row("bandit", "failed")])
    assert parts.main([]) == 1
