"""Steps of a simulated engine on an event loop."""

from __future__ import annotations

import asyncio

import pytest

from shards.kv.keys import TOKEN_BYTES
from shards.nouns import Submission
from simulation.driver import Driver, Unread
from simulation.engine import SimulatedEngine
from simulation.speed import Machine
from simulation.virtual_time import run_virtually
from tests.simulation.scene import EVEN

MACHINE = Machine(EVEN, kv_tokens=64 * 64, running=4, context_tokens=4096)


def a_driver(loop_s: object = None) -> tuple[Driver, list[float]]:
    loop, steps = asyncio.get_running_loop(), list[float]()
    more = {"loop_s": loop_s} if loop_s else {}
    driver = Driver(
        SimulatedEngine(MACHINE, model="m"),
        clock=loop.time,
        on_step=lambda: steps.append(loop.time()),
        **more,  # type: ignore[arg-type]
    )
    return driver, steps


def submitted(driver: Driver, key: str, *, tokens: int = 100, new_tokens: int = 5) -> Unread:
    inbox = driver.submit(Submission(key, tokens, new_tokens), bytes(TOKEN_BYTES * tokens), new_tokens=new_tokens)
    assert isinstance(inbox, Unread)
    return inbox


async def drained(inbox: Unread) -> int:
    tokens = 0
    while True:
        drew = await inbox.take()
        tokens += drew.tokens
        if drew.is_last:
            return tokens


def test_an_answer_takes_as_long_as_its_steps() -> None:
    async def scene() -> float:
        driver, _ = a_driver()
        assert await drained(submitted(driver, "a")) == 5
        driver.leave("a")
        driver.check()
        return asyncio.get_running_loop().time()

    # a prompt of 100 tokens at 0.1 ms each, and five steps of 10 ms
    assert run_virtually(scene()) == pytest.approx(0.06, rel=0.05)


def test_a_loop_that_notices_late_does_not_slow_the_engine_down() -> None:
    async def scene(late_s: float) -> float:
        driver, steps = a_driver(lambda at_s: at_s + late_s)
        readers = [drained(submitted(driver, key, tokens=tokens)) for key, tokens in (("a", 1000), ("b", 1500))]
        await asyncio.gather(*readers)
        for key in ("a", "b"):
            driver.leave(key)
        driver.check()
        return steps[-1]

    assert run_virtually(scene(0.008)) == pytest.approx(run_virtually(scene(0.0)) + 0.008)


def test_a_reader_that_leaves_ends_its_request_and_no_other() -> None:
    async def scene() -> None:
        driver, _ = a_driver()
        submitted(driver, "gone", new_tokens=1000)
        stays = submitted(driver, "stays")
        await asyncio.sleep(0.03)
        driver.leave("gone")
        assert await drained(stays) == 5
        driver.leave("stays")
        assert not driver.engine.has_requests
        driver.check()

    run_virtually(scene())
