"""Beside a busy thread, the event loop waits for the interpreter for less than a millisecond each time."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from router.start.threads import SWITCH_S, switch_often


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


def test_a_thread_gives_the_interpreter_away_after_half_a_millisecond() -> None:
    switch_often()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert SWITCH_S < 0.001
