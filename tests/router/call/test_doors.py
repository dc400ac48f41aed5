"""Doors: closed, they admit no call, and calls that stay too long are ended."""

from __future__ import annotations

import asyncio

import pytest

from policies.errors import CutOff, Unavailable
from router.call.doors import Doors, Stay


async def test_closed_doors_admit_no_call_and_report_when_the_last_one_left() -> None:
    doors = Doors()
    with Stay(doors):
        doors.close()
        assert not await doors.emptied(0.0)
        with pytest.raises(Unavailable, match="another replica") as caught, Stay(doors):
            pass
        assert caught.value.retry_after_s
        doors.check()
    assert await doors.emptied(0.0)
    doors.check()
    assert repr(doors) == "<Doors closed, 0 inside>"


async def test_a_call_that_is_ended_gets_the_reason_and_cleans_up_first() -> None:
    doors, let_go = Doors(), asyncio.Event()

    async def call() -> None:
        with Stay(doors):
            try:
                await asyncio.Event().wait()
            finally:
                let_go.set()

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0)
    doors.turn_out()
    doors.turn_out()
    assert await doors.emptied(5)
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(end) for end in ends] == [CutOff] * 3
    assert let_go.is_set()
    doors.check()


async def test_other_ends_stay_what_they_are() -> None:
    doors = Doors()
    with pytest.raises(TimeoutError), Stay(doors):
        raise TimeoutError
    leaving = asyncio.create_task(_stay(doors))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    doors.check()


async def test_a_call_that_its_client_leaves_while_it_is_ended_is_cancelled() -> None:
    doors = Doors()
    leaving = asyncio.create_task(_stay(doors))
    await asyncio.sleep(0)
    leaving.cancel()
    doors.turn_out()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert doors.inside == 0


async def _stay(doors: Doors) -> None:
    with Stay(doors):
        await asyncio.Event().wait()
