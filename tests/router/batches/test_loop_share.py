"""How long lines hold the event loop, and when the next one may begin."""

from __future__ import annotations

import asyncio

import pytest

from router.batches.loop_share import SHARE, LoopShare
from tests.router.shared.store.parts import HandClock

STEP_S = 0.002
MANY = 200
"""Lines after which the mean is that of their times."""


async def a_line(clock: HandClock) -> str:
    clock.pass_s(STEP_S)
    await asyncio.sleep(0)
    clock.pass_s(STEP_S)
    return "answered"


async def test_lines_begin_so_far_apart_that_they_have_their_share_of_the_loop() -> None:
    clock = HandClock()
    share = LoopShare(clock)
    for _ in range(MANY):
        assert await share.measured(lambda: a_line(clock)) == "answered"
    assert share.wait_s() <= 0.0
    share.begin()
    assert share.wait_s() == pytest.approx(2 * STEP_S / SHARE, rel=1e-3)
    clock.pass_s(2 * STEP_S / SHARE)
    assert share.wait_s() == pytest.approx(0.0, abs=1e-4)


async def test_the_time_that_a_line_waits_does_not_count() -> None:
    clock, answered = HandClock(), asyncio.Event()
    share = LoopShare(clock)
    for _ in range(MANY):
        answered.clear()
        line = asyncio.create_task(share.measured(answered.wait))
        await asyncio.sleep(0)
        clock.pass_s(60.0)
        answered.set()
        await line
    share.begin()
    assert share.wait_s() == pytest.approx(0.0, abs=1e-6)


async def test_lines_that_began_without_others_are_no_debt() -> None:
    clock = HandClock()
    share = LoopShare(clock)
    share.begin()
    first_s = share.wait_s()
    for _ in range(MANY):
        share.begin()
    assert share.wait_s() == first_s


async def test_a_line_that_fails_or_is_cancelled_does_so_inside() -> None:
    clock, ended = HandClock(), list[BaseException]()
    share = LoopShare(clock)

    async def line(work: asyncio.Future[None]) -> None:
        try:
            await work
        except BaseException as error:
            ended.append(error)
            raise

    work = asyncio.get_running_loop().create_future()
    work.set_exception(ValueError("no answer"))
    with pytest.raises(ValueError, match="no answer"):
        await share.measured(lambda: line(work))
    waiting = asyncio.create_task(share.measured(lambda: line(asyncio.get_running_loop().create_future())))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [type(error) for error in ended] == [ValueError, asyncio.CancelledError]
