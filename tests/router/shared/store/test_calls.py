"""Calls to a store that may not answer."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from router.shared.store.base import StoreFailed
from router.shared.store.calls import Calls


@pytest.mark.parametrize("turns", [0, 1])
async def test_calls_that_are_cancelled_before_or_after_they_begin_leave_nothing_that_never_ran(turns: int) -> None:
    calls = Calls(60)
    begun: list[int] = []

    async def call(number: int) -> None:
        begun.append(number)
        await asyncio.Event().wait()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        callers = asyncio.gather(*(calls.run(call, number) for number in range(4)), return_exceptions=True)
        for _ in range(turns):
            await asyncio.sleep(0)
        callers.cancel()
        with pytest.raises(asyncio.CancelledError):
            await callers
        await calls.end()
        gc.collect()
    assert not warned
    assert begun == ([0, 1, 2, 3] if turns else [])


async def test_a_call_without_an_answer_fails_at_its_deadline_or_at_that_of_the_caller() -> None:
    for calls, within_s in ((Calls(0.001), None), (Calls(60), 0.001)):
        with pytest.raises(StoreFailed, match=r"no answer within 0\.001 s"):
            await calls.run(asyncio.Event().wait, within_s=within_s)
        await calls.end()


async def test_a_call_gets_its_arguments_and_gives_its_result_or_its_own_error() -> None:
    async def halved(number: int) -> int:
        if number % 2:
            raise ValueError(number)
        return number // 2

    assert await Calls(60).run(halved, 8) == 4
    with pytest.raises(ValueError, match="7"):
        await Calls(60).run(halved, 7)
