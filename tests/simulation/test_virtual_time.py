"""A clock that jumps: hours pass at once, and what goes wrong in a timer ends the run."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

import pytest

from shards.sched.cost import StepShape
from simulation.arrivals import Arrival
from simulation.speed import Machine, Speed
from simulation.virtual_time import run_virtually
from tests.simulation.scene import a_config, a_fleet, simulated


def test_hours_pass_in_no_time_and_timers_keep_their_order() -> None:
    heard: list[tuple[str, float]] = []

    async def sleeps(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        heard.append((name, asyncio.get_running_loop().time()))

    async def both() -> None:
        await asyncio.gather(sleeps("late", 7200.0), sleeps("early", 3600.0))

    run_virtually(both())
    assert heard == [("early", 3600.0), ("late", 7200.0)]


def test_an_exception_of_a_timer_ends_the_run_for_all_its_waiters() -> None:
    ends: list[str] = []

    def fails() -> None:
        raise ZeroDivisionError("in a timer")

    async def waits() -> None:
        asyncio.get_running_loop().call_later(1.0, fails)
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("let go")

    with pytest.raises(ZeroDivisionError, match="in a timer"):
        run_virtually(waits())
    assert ends == ["let go"]


@dataclass(frozen=True)
class Broken(Speed):
    """Knows no speed for long prompts."""

    def seconds(self, shape: StepShape, *, decoding: int) -> float:
        if shape.tokens > 100:
            raise ArithmeticError("too long")
        return super().seconds(shape, decoding=decoding)


def test_an_engine_that_fails_fails_the_simulation() -> None:
    config = a_config()
    coming = [Arrival(0, 0.0, 64, 1000), Arrival(1, 1.0, 1000, 5)]
    with pytest.raises(ArithmeticError, match="too long"):
        simulated(config, coming, fleet=a_fleet(config, Machine(Broken())))


def test_the_clock_stands_still_while_a_thread_works() -> None:
    async def works() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = []
        for _ in range(3):
            # a timer that a busy machine's thread would always lose against
            async with asyncio.timeout(0.001):
                await asyncio.to_thread(time.sleep, 0.05)
            seen.append(loop.time())
        await asyncio.sleep(5)
        return [*seen, loop.time()]

    assert run_virtually(works()) == [0, 0, 0, 5]


def test_a_thread_that_is_given_up_holds_the_clock_no_longer() -> None:
    async def gives_up() -> float:
        go_on = threading.Event()
        task = asyncio.ensure_future(asyncio.to_thread(go_on.wait))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(3600)
        go_on.set()
        return asyncio.get_running_loop().time()

    assert run_virtually(gives_up()) == 3600
