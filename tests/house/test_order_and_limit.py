"""The options of every test run: a limit of time for each test, and an order drawn from a seed."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HANGING = """
import asyncio, threading, time
import pytest

async def test_awaits_for_ever():
    await asyncio.Event().wait()

async def test_blocks_the_loop():
    time.sleep(600)

def test_waits_for_a_lock():
    threading.Event().wait()

def test_computes_for_ever():
    while True:
        pass

@pytest.fixture
async def never_ready():
    await asyncio.Event().wait()

def test_has_a_fixture_that_hangs(never_ready):
    pass

async def test_ends():
    await asyncio.sleep(0)
"""


def run(*options: str | Path) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False).stdout


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_test_that_hangs_fails_and_the_next_one_runs(workers: str, tmp_path: Path) -> None:
    file = tmp_path / "test_hanging.py"
    file.write_text(HANGING)
    # Without the short summary: with the variable CI set, it repeats each reason in full.
    shown = run(file, "--timeout", "0.3", "-n", workers, "--rootdir", tmp_path, "-rN")
    assert shown.count("Failed: Timeout (>0.3s)") == 5, shown
    assert "4 failed, 1 passed, 1 error" in shown


def test_every_test_has_a_limit(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) <= 60


def test_one_of_each_is_the_one_with_the_first_parameters() -> None:
    shown = run("tests/policies/test_quantities.py", "--collect-only", "--one-of-each")
    tests = [line.partition("::")[2] for line in shown.splitlines() if "::" in line]
    assert "test_durations_are_seconds[800ms-0.8]" in tests
    functions = [test.partition("[")[0] for test in tests]
    text = (ROOT / "tests/policies/test_quantities.py").read_text()
    assert functions == re.findall(r"^def (test_\w+)", text, re.MULTILINE)


def test_each_test_that_is_marked_as_slow_says_why() -> None:
    for file in (ROOT / "tests").rglob("test_*.py"):
        if "mark.slow" in (text := file.read_text()) and file != Path(__file__):
            assert text.count('pytest.mark.slow("') == text.count("mark.slow"), file


def order(seed: int) -> list[str]:
    """Ids of the tests of two files, in the order of this seed."""
    files = ("tests/policies/test_quantities.py", "tests/policies/test_rules.py")
    shown = run(*files, "--collect-only", "--random-order", str(seed))
    return [line for line in shown.splitlines() if "::" in line]


def test_a_seed_draws_an_order_that_keeps_the_tests_of_a_file_together() -> None:
    first, again, other = order(1), order(1), order(2)
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    files = [test.partition("::")[0] for test in first]
    assert sum(a != b for a, b in pairwise(files)) == 1
