"""Beside a busy thread, the event loop waits for the interpreter for less than a millisecond each time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.start.threads import SWITCH_S, switch_often

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


def test_a_thread_gives_the_interpreter_away_after_half_a_millisecond() -> None:
    switch_often()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert SWITCH_S < 0.001


@pytest.mark.parametrize("data", ["'[' * 5000", "'{\"a\":' * 5000", "'[' * 900 + ']' * 900"])
def test_deep_json_ends_no_process_where_the_system_gives_threads_small_stacks(data: str) -> None:
    """The library that decodes calls itself for each level: 1,000 of them end a process whose threads have 256 KB."""
    program = f"""
import threading
from backends.nesting import TooDeep, decode_json
from router.start.threads import give_stacks
give_stacks()
def read():
    try:
        decode_json({data})
    except TooDeep as error:
        print(error)
thread = threading.Thread(target=read)
thread.start()
thread.join()
"""
    command = ["sh", "-c", 'ulimit -s 256 && exec "$@"', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == "nested more than 128 levels deep\n", done.stderr
