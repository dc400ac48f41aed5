import asyncio
from itertools import pairwise

from backends.shard.turns import Turns


async def test_everything_else_runs_between_any_two_turns() -> None:
    turns, log = Turns(), list[str]()

    async def work(name: str) -> None:
        for _ in range(3):
            await turns.take()
            log.append(name)

    async def other() -> None:
        while True:
            log.append(".")
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await asyncio.gather(work("a"), work("b"), work("c"))
    beside.cancel()
    worked = [name for name in log if name != "."]
    assert worked == ["a", "b", "c"] * 3
    assert not any(turn != "." and next_turn != "." for turn, next_turn in pairwise(log))


async def test_a_waiter_that_gives_up_delays_no_other() -> None:
    turns = Turns()
    waiting = [asyncio.create_task(turns.take()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not waiting[2].cancelled()
    await turns.take()
