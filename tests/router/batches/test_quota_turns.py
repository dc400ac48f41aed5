"""Lines of one job in turn at a quota."""

from __future__ import annotations

import asyncio
import contextlib

from router.batches.quota_turns import QuotaTurns
from tests.virtual_time import run_virtually


class Bucket:
    """A quota of `rate` a second, of which `most` can be saved up."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate, self._most, self._level, self._at = rate, most, most, 0.0
        self.passed, self.refused = 0, 0

    def wait_s(self) -> float:
        """0 if one passes now, else the time until one would."""
        now = asyncio.get_running_loop().time()
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level >= 1.0 - 1e-9:
            self._level -= 1.0
            self.passed += 1
            return 0.0
        self.refused += 1
        return (1.0 - self._level) / self._rate


async def pass_through(bucket: Bucket, turns: QuotaTurns, line: str) -> None:
    while True:
        await turns.take(line)
        if (wait_s := bucket.wait_s()) == 0.0:
            turns.passed(line)
            await asyncio.sleep(0.02)
            turns.leave(line)
            return
        turns.refused(wait_s)
        turns.leave(line)


def test_a_quota_is_used_whole_and_refuses_about_one_line_for_each_that_passes() -> None:
    async def run() -> float:
        bucket, turns, clock = Bucket(80 / 60, 80.0), QuotaTurns(), asyncio.get_running_loop().time
        began_at = clock()
        await asyncio.gather(*(pass_through(bucket, turns, str(number)) for number in range(200)))
        assert bucket.passed == 200
        assert bucket.refused <= 1 + 120
        return clock() - began_at

    assert 119 / (80 / 60) <= run_virtually(run()) < 1.05 * 120 / (80 / 60)


def test_a_refusal_makes_the_turns_of_others_void_until_its_time_is_over() -> None:
    async def run() -> None:
        turns, clock = QuotaTurns(), asyncio.get_running_loop().time
        await turns.take("a")
        await turns.take("b")
        turns.refused(5.0)
        turns.refused(1.0)
        assert not turns.holds("b")
        turns.passed("b")
        began_at = clock()
        await turns.take("c")
        assert clock() - began_at == 5.0
        assert turns.holds("c")

    run_virtually(run())


def test_after_a_refusal_lines_go_one_by_one_and_more_as_they_pass() -> None:
    async def run() -> list[int]:
        turns = QuotaTurns()
        turns.refused(1.0)
        taken: list[str] = []

        async def line(name: str) -> None:
            await turns.take(name)
            taken.append(name)

        async with asyncio.TaskGroup() as group:
            for number in range(7):
                group.create_task(line(str(number)))
            await asyncio.sleep(1.5)
            steps = [len(taken)]
            while len(taken) < 7:
                for name in taken:
                    turns.passed(name)
                await asyncio.sleep(0.1)
                steps.append(len(taken))
        return steps

    assert run_virtually(run()) == [1, 2, 4, 7]


def test_a_line_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    async def run() -> None:
        turns = QuotaTurns()
        turns.refused(1.0)
        first, second, third = (asyncio.create_task(turns.take(name)) for name in "abc")
        await asyncio.sleep(2.0)
        assert first.done()
        second.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await second
        turns.leave("a")
        await third
        assert turns.holds("c")

    run_virtually(run())


def test_a_turn_is_given_back_if_its_line_is_cancelled_in_the_same_moment() -> None:
    async def run() -> None:
        turns = QuotaTurns()
        turns.refused(1.0)
        first, second = (asyncio.create_task(turns.take(name)) for name in "ab")
        await asyncio.sleep(0.5)
        asyncio.get_running_loop().call_later(0.5, first.cancel)
        await asyncio.sleep(1.0)
        await second
        assert turns.holds("b")
        assert first.cancelled() or turns.holds("a")

    run_virtually(run())


def test_a_job_that_ends_during_a_rest_leaves_no_timer() -> None:
    async def run() -> None:
        turns = QuotaTurns()
        turns.refused(1.0)
        waiting = asyncio.create_task(turns.take("a"))
        turns.close()
        await asyncio.sleep(5.0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait((waiting,))

    run_virtually(run())
