"""Work that no request waits for."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from router.later import MOST_AT_ONCE, Later, at_once


def test_at_once_is_now() -> None:
    done: list[int] = []
    at_once(done.append, 1)
    assert done == [1]


def test_without_a_loop_work_is_done_at_once() -> None:
    done: list[int] = []
    later = Later()
    later(done.append, 1)
    later(done.append, 2)
    assert done == [1, 2]
    assert repr(later) == "<Later 0 waiting>"


async def test_without_a_delay_work_is_done_at_once_and_in_order() -> None:
    done: list[int] = []
    later = Later(after_s=None)
    later(lambda: (later(done.append, 2), done.append(1)))
    assert sorted(done) == [1, 2]
    later(done.append, 3)
    assert done[-1] == 3


async def test_on_a_loop_work_is_done_together_in_its_order() -> None:
    done: list[int] = []
    over = asyncio.Event()
    later = Later(after_s=0.001)
    for number in range(3 * MOST_AT_ONCE):
        later(done.append, number)
    later(over.set)
    assert done == []
    assert repr(later) == f"<Later {3 * MOST_AT_ONCE + 1} waiting>"
    await over.wait()
    assert done == [*range(3 * MOST_AT_ONCE)]


async def test_the_loop_has_its_turn_between_many_pieces() -> None:
    seen: list[int] = []
    done: list[int] = []
    over = asyncio.Event()
    later = Later(after_s=0.0)
    later(asyncio.get_running_loop().call_soon, lambda: seen.append(len(done)))
    for number in range(3 * MOST_AT_ONCE):
        later(done.append, number)
    later(over.set)
    await over.wait()
    assert seen
    assert seen[0] < 3 * MOST_AT_ONCE


async def test_flush_does_now_what_waits_and_nothing_twice() -> None:
    done: list[int] = []
    later = Later(after_s=0.001)
    later(done.append, 1)
    later.flush()
    assert done == [1]
    later.flush()
    over = asyncio.Event()
    later(over.set)
    await over.wait()
    assert done == [1]


async def test_another_thread_does_nothing() -> None:
    done: list[int] = []
    later = Later()
    later(done.append, threading.get_ident())
    await asyncio.to_thread(later.flush)
    assert done == []
    later.flush()
    assert done == [threading.get_ident()]


async def test_what_fails_is_logged_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    later = Later()
    with caplog.at_level(logging.ERROR, "pointsman.later"):
        later({}.__getitem__, "missing")
        later(done.append, 1)
        later.flush()
    assert done == [1]
    assert "work behind a request failed" in caplog.text
