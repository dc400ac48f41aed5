"""A part that gets no CPU is told from one that is dead."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import pytest

from tests.chaos.day.starvation import Starvation, waited_s

SHARD, ROUTER = ("shard", 1), ("router", 0)


def seen(monkeypatch: pytest.MonkeyPatch, waited: Iterable[dict[int, float]]) -> Starvation:
    """A look each second at a shard with threads that have `waited` so long in all."""
    starvation = Starvation()
    for second, threads in enumerate(waited):
        monkeypatch.setattr("tests.chaos.day.starvation.waited_s", lambda _, threads=threads: threads)
        monkeypatch.setattr("tests.chaos.day.starvation.time.monotonic", lambda second=second: float(second))
        starvation.look(SHARD, 1)
    return starvation


def test_a_part_with_a_thread_that_waits_for_seconds_is_starved_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    starvation = seen(monkeypatch, [{7: min(0.9 * second, 5.4), 8: 100.0} for second in range(40)])
    assert [starvation.is_starved({SHARD, ROUTER}, at) for at in (2.0, 6.0, 12.0, 30.0)] == [False, True, True, False]
    assert not starvation.is_starved({ROUTER}, 6.0), "another part"


def test_the_waits_of_several_threads_or_of_before_the_first_look_are_not_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = [dict.fromkeys(range(20), 50.0 + 0.1 * second) for second in range(10)]
    assert not seen(monkeypatch, threads).is_starved({SHARD}, 9.0)


def test_a_program_that_was_started_again_has_new_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not seen(monkeypatch, [{1: 0.0}, {}, {2: 90.0}]).is_starved({SHARD}, 2.0)


def test_linux_tells_the_wait_of_each_thread() -> None:
    found = waited_s(os.getpid())
    assert threading.get_native_id() in found
    assert min(found.values()) >= 0.0
    assert waited_s(2**30) == {}
