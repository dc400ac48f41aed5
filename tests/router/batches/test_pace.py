"""The threads of batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator

import pytest

from router.batches.pace import LISTED_AT_ONCE, MOST_THREADS, Interrupted, Pace


async def test_while_a_store_hangs_in_all_threads_of_batches_others_have_theirs() -> None:
    pace, goes_on = Pace(), threading.Event()
    hanging = [asyncio.create_task(pace.run(goes_on.wait)) for _ in range(2 * MOST_THREADS)]
    try:
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(str, 7) == "7"
        assert not any(task.done() for task in hanging)
    finally:
        goes_on.set()
        assert all(await asyncio.gather(*hanging))
        pace.close()


async def test_what_fails_in_a_thread_is_raised() -> None:
    pace = Pace()
    with pytest.raises(ValueError, match="seven"):
        await pace.run(int, "seven")
    pace.close()


class Opened:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


async def test_what_is_opened_for_a_cancelled_task_is_closed() -> None:
    pace, begun, goes_on, made = Pace(), threading.Event(), threading.Event(), Opened()

    def make() -> Opened:
        begun.set()
        goes_on.wait()
        return made

    opening = asyncio.create_task(pace.opened(make))
    await asyncio.to_thread(begun.wait)
    opening.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert made.is_closed
    pace.close()


def test_work_ends_when_its_router_stops() -> None:
    pace = Pace(clock=lambda: 0.0)
    through = pace.through(range(9))
    assert next(through) == 0
    pace.stop()
    with pytest.raises(Interrupted):
        next(through)
    pace.close()


async def test_lists_of_one_tenant_keep_neither_lists_of_others_nor_other_work_waiting() -> None:
    pace, goes_on, read = Pace(), threading.Event(), list[str]()

    def entries(tenant: str, count: int) -> Generator[int, None, str]:
        for _ in range(count):
            goes_on.wait()
            read.append(tenant)
            yield 1
        return tenant

    many = [asyncio.create_task(pace.listed("many", entries("many", 10 * LISTED_AT_ONCE))) for _ in range(32)]
    few = asyncio.create_task(pace.listed("few", entries("few", LISTED_AT_ONCE)))
    await asyncio.sleep(0)
    assert await pace.run(int, "7") == 7, "while lists hang too"
    goes_on.set()
    assert await few == "few"
    assert sum(tenant == "many" for tenant in read) < 10 * LISTED_AT_ONCE
    assert await asyncio.gather(*many) == ["many"] * 32
    pace.close()
