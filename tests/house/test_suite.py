"""`make test` is green only if every test ran, and passed or was forgiven."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXPECTED = yaml.safe_load((ROOT / "tests/expected.yaml").read_text())

PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    raise AssertionError\n"
PASSES_ALONE = "import os\ndef test_late():\n    assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
KILLS_THE_RUN = "import os, signal\ndef test_killed():\n    os.kill(os.getppid(), signal.SIGKILL)\n"
STOPS_THE_RUN = "import pytest\ndef test_stops():\n    pytest.exit('enough', returncode=0)\n"
IS_UNREADABLE = "import no_such_module\n"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """.ci/suite.py for a tree of tests below `tmp_path`, with this repository's conftest."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    module = import_module("suite")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ACCOUNTS", tmp_path / "accounts")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "accounts").mkdir()
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {ROOT}\naddopts = --import-mode=importlib -q\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "conftest.py")
    return module


def written(folder: Path, **texts: str) -> None:
    """Write each text as a file of tests."""
    for name, text in texts.items():
        (folder / f"tests/test_{name}.py").write_text(text)


def an_account(**fields: Any) -> dict[str, Any]:
    return {"status": 0, "passed": 0, "failed": [], "skipped": [], "files": [], **fields}


def test_a_first_run_that_is_killed_is_red_whatever_an_older_run_left(suite: ModuleType, tmp_path: Path) -> None:
    written(tmp_path, killed=KILLS_THE_RUN, passes=PASSES)
    left = tmp_path / ".pytest_cache/v/cache/lastfailed"
    left.parent.mkdir(parents=True)
    left.write_text(json.dumps({"tests/test_passes.py::test_passes": True}))
    result = suite.twice("all", ["-n", "1", "tests"])
    assert result.account is None
    assert result.faults == ["all: pytest ended with status -9 before all tests had run"]


def test_a_test_that_passes_alone_is_flaky_and_a_defect_is_red(suite: ModuleType, tmp_path: Path) -> None:
    written(tmp_path, late=PASSES_ALONE, passes=PASSES)
    late = suite.twice("all", ["-n", "1", "tests"])
    assert (late.flaky, late.faults) == (["tests/test_late.py::test_late"], [])
    written(tmp_path, fails=FAILS)
    both = suite.twice("all", ["-n", "1", "tests"])
    assert both.flaky == ["tests/test_late.py::test_late"]
    assert both.faults == ["tests/test_fails.py::test_fails: failed, and failed again"]
    assert (both.account.passed, both.account.tests) == (1, 3)


@pytest.mark.parametrize("texts", [{}, {"stops": STOPS_THE_RUN, "zoo": PASSES}, {"unreadable": IS_UNREADABLE}])
def test_a_run_of_nothing_or_of_a_part_is_red(suite: ModuleType, tmp_path: Path, texts: dict[str, str]) -> None:
    written(tmp_path, **texts)
    result = suite.twice("all", ["-n", "0", "tests"])
    expected = {"tests": {"all": 0}, "elsewhere": [], "skipped": [], "flaky": []}
    assert suite.judge({"all": result}, expected)


@pytest.mark.parametrize(
    "ending",
    [
        "import os\ndef test_ends():\n    os._exit(0)\n",
        "import os\ndef test_ends():\n    os._exit(1)\n",
        "import pytest\ndef test_ends():\n    pytest.exit('enough', returncode=0)\n",
        "import os, pytest\nif 'PYTEST_XDIST_WORKER' in os.environ:\n    os._exit(0)\ndef test_ends():\n    pass\n",
    ],
    ids=["ends with 0", "ends with 1", "exits", "ends as it is collected"],
)
def test_a_worker_that_ends_makes_no_run_green(suite: ModuleType, tmp_path: Path, ending: str) -> None:
    written(tmp_path, ending=ending, passes=PASSES)
    result = suite.twice("all", ["-n", "1", "--max-worker-restart", "0", "tests"])
    assert suite.judge({"all": result}, {"tests": {"all": 2}, "elsewhere": [], "skipped": [], "flaky": []})


def test_many_failures_are_no_late_processes(suite: ModuleType) -> None:
    calls = []

    def run(name: str, arguments: list[str]) -> tuple[int, Any]:
        calls.append(name)
        failed = [f"tests/test_x.py::test_{number}" for number in range(suite.MOST_AGAIN + 1)]
        return 1, suite.Account(**an_account(status=1, failed=failed))

    assert suite.twice("all", [], run).faults
    assert calls == ["all"]


@pytest.mark.parametrize("status", [2, 3, 4, 5, -9, -11, 137])
def test_only_a_run_that_came_to_its_end_is_followed_by_a_second_one(suite: ModuleType, status: int) -> None:
    calls = []

    def run(name: str, arguments: list[str]) -> tuple[int, Any]:
        calls.append(name)
        return status, suite.Account(**an_account(status=status, failed=["tests/test_x.py::test_x"]))

    assert suite.twice("all", [], run).faults
    assert calls == ["all"]


@pytest.mark.parametrize(
    ("flaky", "faults"),
    [
        ([], 0),
        (["tests/chaos/test_x.py::test_a[1]"], 0),
        (["tests/chaos/test_x.py::test_a[1]", "tests/chaos/test_x.py::test_a[2]"], 1),
        (["tests/policies/test_x.py::test_a"], 1),
    ],
)
def test_the_list_bounds_what_is_forgiven(suite: ModuleType, flaky: list[str], faults: int) -> None:
    listed = [{"tests": "tests/chaos/*", "at_most": 1, "since": "2026-11-28", "reason": "kills processes"}]
    assert len(suite.not_forgiven(flaky, listed)) == faults


@pytest.mark.parametrize(
    ("file", "reason", "here", "faults"),
    [
        ("tests/test_x.py", "no helm here", set(), 0),
        ("tests/test_x.py", "no helm here", {"program helm"}, 1),
        ("tests/test_x.py", "there is no PostgreSQL", {"file /usr/lib/postgresql/*/bin/initdb"}, 1),
        ("tests/test_x.py", "I do not like it", set(), 1),
        ("tests/test_x.py", "it only streams", set(), 1),
        ("tests/contracts/test_backend.py", "it only streams", set(), 0),
    ],
)
def test_a_test_is_skipped_only_for_a_listed_reason_that_holds_here(
    suite: ModuleType, file: str, reason: str, here: set[str], faults: int
) -> None:
    account = suite.Account(**an_account(skipped=[(file, reason, 3)]))
    assert len(suite.skipped_in_vain(account, EXPECTED["skipped"], here.__contains__)) == faults


def test_what_this_machine_has_is_found(suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made-17").mkdir()
    monkeypatch.setenv("MADE", str(tmp_path))
    there = ["program sh", "module json", "file made-*", "file $MADE/made-*"]
    assert [suite.is_here(thing) for thing in there] == [True] * 4
    missing = ["program no-such-program", "module no_such_module", "file made-*/no", "file $MADE/no"]
    assert [suite.is_here(thing) for thing in missing] == [False] * 4


def test_every_condition_of_the_list_can_be_looked_up(suite: ModuleType) -> None:
    for entry in EXPECTED["skipped"]:
        for thing in entry.get("without", ()):
            suite.is_here(thing)


def test_each_forgiven_test_has_a_reason_and_a_date_and_exists() -> None:
    tracked = subprocess.run(["git", "ls-files", "tests"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for entry in EXPECTED["flaky"]:
        assert entry.keys() == {"tests", "at_most", "since", "reason"}
        assert entry["since"].year >= 2026
        assert 0 < entry["at_most"] <= 8
        assert len(entry["reason"]) > 20
        assert entry["tests"].partition("::")[0].rstrip("*") in tracked


def test_files_and_tests_that_did_not_run_are_missed(suite: ModuleType, tmp_path: Path) -> None:
    written(tmp_path, here=PASSES, forgotten=PASSES, kernel=PASSES)
    result = suite.Result(suite.Account(**an_account(passed=1, files=["tests/test_here.py"])))
    expected = {"tests": {"all": 2}, "elsewhere": ["tests/test_k*"], "skipped": [], "flaky": []}
    faults = suite.judge({"all": result}, expected)
    assert faults == ["all: 1 tests, at least 2 are expected", "tests/test_forgotten.py: no test of it ran"]


def reasons_in(source: str) -> Iterator[str]:
    """The reasons of all skips that a file of tests states itself, with * for what is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, given = node.func.attr, {word.arg: word.value for word in node.keywords}
            if name == "skip" and node.args:
                reason: ast.expr | None = node.args[0]
            elif name in ("skip", "skipif"):
                reason = given.get("reason")
            elif name == "importorskip":
                module = node.args[0]
                bare = ast.Constant(f"could not import {module.value!r}") if isinstance(module, ast.Constant) else None
                reason = given.get("reason", bare)
            else:
                continue
            if isinstance(reason, ast.Constant):
                yield str(reason.value)
            elif isinstance(reason, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "*" for part in reason.values)


def test_the_list_has_every_reason_that_a_test_states() -> None:
    """torch, triton and their like are installed wherever all tests run: to miss them is no reason."""
    never = {"triton is not installed", "needs torch", "needs *", "*"}
    missing = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for reason in reasons_in(file.read_text()):
            known = any(
                (fnmatchcase(reason, entry["reason"]) or fnmatchcase(entry["reason"], reason))
                and fnmatchcase(name, entry.get("in", "*"))
                for entry in EXPECTED["skipped"]
            )
            if not known and reason not in never and not reason.startswith("could not import"):
                missing.append(f"{name}: {reason}")
    assert not missing, "add it to tests/expected.yaml, with what the machine lacks"
