from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shards.loop import EngineError, EngineLoop
from shards.nouns import FinishReason, Report, Submission
from shards.scripted import ScriptedEngine
from tests.still import still


class Ear:
    """Hears reports and lets a test wait for one that it describes."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self._heard = asyncio.Event()

    def __call__(self, report: Report) -> None:
        self.reports.append(report)
        self._heard.set()

    async def until(self, is_enough: Callable[[list[Report]], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_enough(self.reports):
                self._heard.clear()
                await self._heard.wait()

    async def until_finished(self) -> FinishReason:
        await self.until(lambda reports: any(report.finished for report in reports))
        return next(report.finished[0].reason for report in self.reports if report.finished)


@asynccontextmanager
async def running(engine: ScriptedEngine, capacity: int = 256) -> AsyncIterator[tuple[EngineLoop, Ear]]:
    loop, ear = EngineLoop(engine, capacity=capacity), Ear()
    loop.subscribe(ear)
    loop.start()
    try:
        yield loop, ear
    finally:
        await loop.stop()


def a_submission(prompt_tokens: int = 1, max_new_tokens: int = 2) -> Submission:
    return Submission("key", prompt_tokens, max_new_tokens)


async def test_a_request_runs_on_the_engines_thread_and_its_reports_come_to_the_event_loop() -> None:
    engine, threads = ScriptedEngine(), set()
    async with running(engine) as (loop, ear):
        loop.subscribe(lambda _: threads.add(threading.current_thread()))
        await loop.put(lambda engine: engine.submit(a_submission()))
        await loop.put(lambda engine: engine.extend("key", b"\x01\0\0\0"))
        assert await ear.until_finished() == FinishReason.LENGTH
        assert [drawn.token_ids for report in ear.reports for drawn in report.drawn] == [(2,), (3,)]
        assert threads == {threading.current_thread()}
        await loop.check()


async def test_an_engine_without_work_takes_no_steps() -> None:
    async with running(ScriptedEngine()) as (loop, ear):
        loop.post(lambda engine: None)
        await ear.until(lambda reports: len(reports) == 1)
        await asyncio.sleep(0.02)
        assert len(ear.reports) == 1
        assert "1 steps" in repr(loop)


async def test_a_subscriber_that_fails_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loop, ear = EngineLoop(ScriptedEngine()), Ear()

    def fail(report: Report) -> None:
        raise ValueError("no ear for this")

    loop.subscribe(fail)
    loop.subscribe(ear)
    loop.start()
    loop.post(lambda engine: None)
    await ear.until(lambda reports: len(reports) == 1)
    await loop.stop()
    assert "a subscriber failed on step 1" in caplog.text


async def test_an_engine_that_raises_ends_the_loop_loudly(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    async with running(engine) as (loop, _):
        engine.failure = RuntimeError("CUDA is gone")
        loop.post(lambda engine: None)
        failure = await asyncio.wait_for(loop.died, 5)
        assert isinstance(failure, EngineError)
        assert "CUDA is gone" in str(failure)
        await loop.put(lambda engine: pytest.fail("a dead engine was driven on"))
        with pytest.raises(EngineError):
            await loop.check()
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]


async def test_put_waits_while_the_queue_is_full() -> None:
    gate, entered = threading.Event(), threading.Event()

    def hold(engine: object) -> None:
        entered.set()
        gate.wait()

    async with running(ScriptedEngine(), capacity=2) as (loop, _):
        loop.post(hold)
        await asyncio.to_thread(entered.wait)
        await loop.put(lambda engine: None)
        await loop.put(lambda engine: None)
        third = asyncio.create_task(loop.put(lambda engine: None))
        assert not await still(third.done)
        gate.set()
        await asyncio.wait_for(third, 5)


async def test_what_is_asked_is_answered_between_the_reports_of_two_steps() -> None:
    engine, heard = ScriptedEngine(), []
    async with running(engine) as (loop, ear):
        loop.subscribe(lambda report: heard.append(("report", report.step)))
        loop.post(lambda engine: None)
        loop.ask(lambda engine: "snapshot", lambda answer: heard.append((answer, 0)))
        await ear.until(lambda reports: bool(reports) and ("snapshot", 0) in heard)
    names = [name for name, _ in heard]
    assert names.index("snapshot") < len(names) - 1, "a report follows the answer"


async def test_check_raises_what_the_engine_finds_broken_and_the_loop_goes_on() -> None:
    class Broken(ScriptedEngine):
        def check(self) -> None:
            raise AssertionError("a block is lost")

    async with running(Broken()) as (loop, _):
        for _ in range(2):
            with pytest.raises(AssertionError, match="a block is lost"):
                await loop.check()


async def test_a_deadline_wakes_an_engine_that_sleeps() -> None:
    class Late(ScriptedEngine):
        next_deadline_s: float | None = 0.0

        @property
        def has_work(self) -> bool:
            return self.next_deadline_s is not None and self.is_held

        def step(self) -> Report:
            self.next_deadline_s, self.is_held = None, False
            return super().step()

    engine = Late()
    async with running(engine) as (_, ear):
        engine.is_held = True
        await ear.until(lambda reports: bool(reports))


async def test_a_stopped_loop_drops_commands() -> None:
    loop = EngineLoop(ScriptedEngine())
    loop.start()
    await loop.stop()
    await loop.put(lambda engine: pytest.fail("ran after stop"))
    await loop.check()
    assert "stopping" in repr(loop)
