from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager

import pytest

from router.text.turns import Turns


@asynccontextmanager
async def some_turns(turn: int = 1) -> AsyncIterator[Turns]:
    turns = Turns(1, turn, name="test")
    try:
        yield turns
    finally:
        turns.close()


class Log(list[str]):
    def work(self, name: str, steps: int) -> Generator[int, None, str]:
        for _ in range(steps):
            self.append(name)
            yield 1
        return name


async def test_tenants_take_turns_and_so_do_the_calls_of_each() -> None:
    log, gate = Log(), threading.Event()

    def first() -> Generator[int, None, str]:
        gate.wait(10)
        yield 1
        return "first"

    async with some_turns() as turns:
        running = [asyncio.create_task(turns.run("x", first()))]
        await asyncio.sleep(0)
        for owner, name, steps in (("a", "a1", 3), ("a", "a2", 3), ("b", "b", 2), ("c", "c", 1)):
            running.append(asyncio.create_task(turns.run(owner, log.work(name, steps))))
            await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(*running) == ["first", "a1", "a2", "b", "c"]
    assert log[:6] == ["a1", "b", "c", "a2", "b", "a1"]
    assert sorted(log) == ["a1"] * 3 + ["a2"] * 3 + ["b"] * 2 + ["c"]


async def test_a_turn_is_as_long_as_its_steps_are_together() -> None:
    log = Log()
    async with some_turns(turn=3) as turns:
        both = (turns.run("a", log.work("a", 6)), turns.run("b", log.work("b", 4)))
        assert await asyncio.gather(*both) == ["a", "b"]
    assert "".join(log) == "aaabbbaaab"


async def test_errors_come_out_and_the_thread_is_free_again() -> None:
    def fails() -> Generator[int, None, None]:
        yield 1
        raise ValueError("no")

    async with some_turns() as turns:
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                await turns.run("a", fails())
        assert await turns.run("a", Log().work("a", 2)) == "a"


async def test_what_is_cancelled_ends_behind_its_turn_and_frees_the_thread() -> None:
    log, began, gate = Log(), threading.Event(), threading.Event()

    def blocked() -> Generator[int, None, None]:
        began.set()
        gate.wait(10)
        yield 1
        log.append("another turn of a cancelled call")

    async with some_turns() as turns:
        running = asyncio.create_task(turns.run("a", blocked()))
        await asyncio.to_thread(began.wait, 10)
        waiting = [asyncio.create_task(turns.run("b", log.work(name, 1))) for name in ("gone", "stays")]
        await asyncio.sleep(0)
        waiting[0].cancel()
        running.cancel()
        await asyncio.sleep(0)
        assert log == []
        gate.set()
        assert await waiting[1] == "stays"
        assert await turns.run("c", log.work("c", 1)) == "c"
    assert log == ["stays", "c"]


async def test_a_call_that_is_cancelled_just_when_it_gets_the_thread_gives_it_back() -> None:
    log, began, gate = Log(), threading.Event(), threading.Event()

    class Cancelling(Turns):
        def _release(self) -> None:
            super()._release()
            waiting.cancel()

    def first() -> Generator[int, None, str]:
        began.set()
        gate.wait(10)
        yield 1
        return "first"

    turns = Cancelling(1, turn=2, name="test")
    running = asyncio.create_task(turns.run("a", first()))
    await asyncio.to_thread(began.wait, 10)
    waiting = asyncio.create_task(turns.run("b", log.work("b", 1)))
    await asyncio.sleep(0)
    gate.set()
    assert await running == "first"
    async with asyncio.timeout(10):
        assert await turns.run("c", log.work("c", 1)) == "c"
    assert log == ["c"]
    turns.close()
