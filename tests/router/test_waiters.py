"""One queue for all that wait: owners in turn, and no caller suffers from what happens to another."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Hashable
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.errors import Overloaded
from router.batches.quota_turns import QuotaTurns
from router.call.bodies import Memory
from router.text.turns import Turns, once
from router.waiters import Waiter, Waiters
from tests.virtual_time import VirtualTimeLoop, run_virtually

Wish = Waiter[str, str, str]


class Slots:
    """Lends `free` slots to callers, as simply as that can be."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.served: list[str] = []
        """The names to which a slot was lent, in that order; the callers hear of it later."""
        self.waiters = Waiters[str, str, str](take_back=self.take_back, left=self.serve)

    async def take(self, owner: str, name: str, kind: Hashable = None, timeout_s: float | None = None) -> str:
        if not self.waiters and self.free:
            self.free -= 1
            self.served.append(name)
            return name
        return await self.waiters.wait(owner, name, kind=kind, timeout_s=timeout_s)

    def give_back(self) -> None:
        self.free += 1
        self.serve()

    def serve(self) -> None:
        self.waiters.serve(self.lend)

    def lend(self, waiter: Wish) -> str | None:
        if not self.free:
            return None
        self.free -= 1
        self.served.append(waiter.wish)
        return waiter.wish

    def take_back(self, _: Wish, __: str) -> None:
        self.give_back()


async def begun(slots: Slots, *names: str, kind: Hashable = None) -> list[asyncio.Task[str]]:
    """A caller waits under each of `names`, the first letter of which is its owner."""
    tasks = [asyncio.create_task(slots.take(name[0], name, kind)) for name in names]
    await asyncio.sleep(0)
    return tasks


async def in_order(slots: Slots, tasks: list[asyncio.Task[str]]) -> list[str]:
    """The callers in the order in which they are served, one by one."""
    served = list[str]()
    for task in tasks:
        task.add_done_callback(lambda done: served.append(done.result()))
    for _ in tasks:
        slots.give_back()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return served


async def test_owners_take_turns_and_the_callers_of_each_keep_their_order() -> None:
    slots = Slots(0)
    tasks = await begun(slots, "a1", "a2", "a3", "b1", "b2", "c1")
    assert await in_order(slots, tasks) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    slots.waiters.check()


async def test_a_wish_that_cannot_be_met_is_passed_by_those_of_other_kinds_and_by_none_of_its_own() -> None:
    slots = Slots(0)
    tasks = [*await begun(slots, "a1", "a2", kind="large"), *await begun(slots, "a3", "a4", kind="small")]
    assert [waiter.wish for waiter in slots.waiters.first()] == ["a1", "a3"]
    assert slots.waiters.serve(lambda waiter: waiter.wish if waiter.kind == "small" else None) == 2
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [False, False, True, True]
    asked = list[str]()
    assert slots.waiters.serve(lambda waiter: asked.append(waiter.wish)) == 0
    assert asked == ["a1"], "a look asks once for each kind"
    assert slots.waiters.has("a", "large")
    assert not slots.waiters.has("a", "small")
    assert not slots.waiters.has("b", "large")
    await in_order(slots, tasks[:2])


async def test_of_the_kinds_of_an_owner_the_oldest_caller_goes_first() -> None:
    slots = Slots(0)
    tasks = [
        *await begun(slots, "a1", kind="x"),
        *await begun(slots, "a2", kind="y"),
        *await begun(slots, "a3", kind="x"),
    ]
    assert await in_order(slots, tasks) == ["a1", "a2", "a3"]


async def test_so_many_are_served_and_no_more() -> None:
    slots = Slots(0)
    tasks = await begun(slots, *(f"{owner}{number}" for owner in "ab" for number in range(3)))
    assert slots.waiters.serve(lambda waiter: waiter.wish, 4) == 4
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, True, False, True, True, False]
    assert slots.waiters.serve(lambda waiter: waiter.wish, 0) == 0
    assert slots.waiters.serve(lambda waiter: waiter.wish) == 2
    await asyncio.gather(*tasks)


def test_a_caller_that_waits_for_too_long_leaves_and_those_behind_it_move_up_at_once() -> None:
    async def run() -> None:
        memory = Memory(400, wait_s=10.0)
        assert memory.lend("a", 200)
        large = asyncio.create_task(memory.take("a", 150))
        await asyncio.sleep(5)
        small = asyncio.create_task(memory.take("a", 20))
        await asyncio.sleep(5.001)
        assert large.done()
        assert small.done()
        assert large.exception() is not None
        memory.give_back("a", 220)
        memory.check()

    run_virtually(run())


@pytest.mark.parametrize("is_served_first", [True, False])
def test_of_being_served_and_expiring_in_one_moment_the_first_counts(is_served_first: bool) -> None:
    async def run() -> None:
        slots, loop = Slots(0), asyncio.get_running_loop()
        if is_served_first:
            loop.call_at(1.0, slots.give_back)
        waiting = asyncio.create_task(slots.take("a", "a1", timeout_s=1.0))
        await asyncio.sleep(0)
        if not is_served_first:
            loop.call_at(1.0, slots.give_back)
        (ended,) = await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0)
        if is_served_first:
            assert (ended, slots.free) == ("a1", 0)
        else:
            assert (type(ended), slots.free) == (TimeoutError, 1)
        assert not slots.waiters

    run_virtually(run())


async def test_a_caller_that_is_cancelled_in_the_moment_in_which_another_gives_back_is_passed_over() -> None:
    slots = Slots(0)
    first, second = await begun(slots, "a1", "a2")
    first.cancel()
    slots.give_back()
    assert await second == "a2"
    assert first.cancelled() or await asyncio.wait((first,))
    assert slots.free == 0
    assert not slots.waiters


async def test_a_caller_that_is_cancelled_just_after_it_was_served_hands_that_on() -> None:
    slots = Slots(0)
    first, second = await begun(slots, "a1", "b1")
    slots.give_back()
    first.cancel()
    assert await second == "b1"
    assert slots.free == 0
    slots.waiters.check()


async def test_a_caller_whose_coroutine_is_closed_leaves() -> None:
    slots = Slots(0)
    waiting = slots.take("a", "a1")
    waiting.send(None)
    waiting.close()
    assert not slots.waiters
    slots.give_back()
    assert slots.free == 1


async def test_what_lending_raises_is_the_failure_of_that_caller_alone() -> None:
    slots = Slots(0)
    first, second = await begun(slots, "a1", "b1")

    def lend(waiter: Wish) -> str:
        if waiter.owner == "a":
            raise ValueError("no")
        return waiter.wish

    assert slots.waiters.serve(lend) == 1
    with pytest.raises(ValueError, match="no"):
        await first
    assert await second == "b1"
    slots.waiters.check()


def test_memory_that_is_given_back_just_when_callers_expire_is_not_lost() -> None:
    async def run() -> None:
        # two wait for memory that others hold, and their time is over in the turn in which some comes back
        memory = Memory(76, wait_s=10.0)
        for owner in "abcdefgh":
            assert memory.lend(owner, 6)
        waiting = [asyncio.create_task(memory.take(owner, 40)) for owner in "xy"]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(10.0, memory.give_back, "a", 6)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in ended] == [Overloaded, Overloaded]
        for owner in "bcdefgh":
            memory.give_back(owner, 6)
        memory.check()
        assert memory.lend("a", 50), "all of it is there"

    run_virtually(run())


async def test_a_queue_of_cancelled_callers_alone_holds_no_new_one_up() -> None:
    # reported of another library's lock: released, and taken again, before the cancelled callers have run
    slots = Slots(0)
    tasks = await begun(slots, "a1", "a2", "b1")
    # its first step is before theirs
    new = asyncio.create_task(slots.take("a", "a3"))
    for task in tasks:
        task.cancel()
    slots.give_back()
    async with asyncio.timeout(5):
        assert await new == "a3"
    assert slots.free == 0


async def test_neither_does_one_before_memory_threads_or_a_quota() -> None:
    memory, turns, quota = Memory(100), Turns(1, 1, name="test"), QuotaTurns()
    goes_on = threading.Event()

    def work() -> Generator[int, None, None]:
        goes_on.wait()
        yield 1

    assert memory.lend("a", 70)
    running = asyncio.create_task(turns.run("a", work()))
    await asyncio.sleep(0)
    quota.refused(0.0)
    calls: list[Callable[[], Coroutine[Any, Any, object]]]
    calls = [lambda: memory.take("a", 60), lambda: turns.run("b", once(lambda: "done")), lambda: quota.take("line")]
    tasks = [asyncio.create_task(call()) for call in calls for _ in range(3)]
    await asyncio.sleep(0)
    new = [asyncio.create_task(call()) for call in calls]
    for task in tasks:
        task.cancel()
    memory.give_back("a", 70)
    goes_on.set()
    async with asyncio.timeout(5):
        await asyncio.gather(running, *new)
    turns.close()


class Call(NamedTuple):
    """A caller that waits or holds a slot."""

    name: str
    owner: str
    task: asyncio.Task[str]


class Waiting(RuleBasedStateMachine):
    """Callers wait, expire, are cancelled and give back in any order, often several of that in one turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.loop.set_exception_handler(lambda _, context: self.raised.append(context))
        self.raised: list[dict[str, object]] = []
        self.slots = Slots(2)
        self.calls: list[Call] = []
        self.lent = Counter[str]()
        self.number = 0

    async def _call(self, owner: str, name: str, kind: str, timeout_s: float | None) -> str:
        await self.slots.take(owner, name, kind, timeout_s)
        # nothing that is awaited between: what is lent is held from here on
        self.lent[name] += 1
        return name

    def _turn(self, seconds: float = 0.0) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(owner=st.sampled_from("abc"), kind=st.sampled_from("xy"), timeout_s=st.sampled_from([None, 0.0, 1.0, 2.0]))
    def waits(self, owner: str, kind: str, timeout_s: float | None) -> None:
        self.number += 1
        name = f"{owner}{kind}{self.number}"
        task = self.loop.create_task(self._call(owner, name, kind, timeout_s))
        self.calls.append(Call(name, owner, task))

    @precondition(lambda self: self.calls)
    @rule(which=st.integers(0, 50))
    def is_cancelled(self, which: int) -> None:
        self.calls[which % len(self.calls)].task.cancel()

    @precondition(lambda self: self.lent)
    @rule(which=st.integers(0, 50))
    def gives_back(self, which: int) -> None:
        name = sorted(self.lent)[which % len(self.lent)]
        del self.lent[name]
        self.slots.give_back()

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self._turn(seconds)

    @invariant()
    def no_more_is_lent_than_there_is(self) -> None:
        assert 0 <= self.slots.free <= 2
        assert len(self.lent) + self.slots.free <= 2
        assert not self.raised
        self.slots.waiters.check()

    @invariant()
    def callers_of_one_owner_and_kind_are_served_in_their_order(self) -> None:
        served = self.slots.served
        for begin in {name[:2] for name in served}:
            numbers = [int(name[2:]) for name in served if name[:2] == begin]
            assert numbers == sorted(numbers)

    def teardown(self) -> None:
        for _ in range(5):
            self._turn()
        while self.lent:
            self.lent.popitem()
            self.slots.give_back()
            self._turn()
            self._turn()
        self._turn(5.0)
        for call in self.calls:
            assert call.task.done(), f"{call.name} waits though slots are free"
            if not call.task.cancelled() and (error := call.task.exception()) is not None:
                assert isinstance(error, TimeoutError)
        while self.lent:
            self.lent.popitem()
            self.slots.give_back()
        assert self.slots.free == 2, "what was lent is lost"
        assert not self.slots.waiters
        assert not self.raised
        self.loop.close()


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(10))
def test_lines_at_a_quota_are_cancelled_refused_and_pass_in_any_order_and_no_turn_is_lost(seed: int) -> None:
    rng = random.Random(seed)

    async def run() -> None:
        turns, tried = QuotaTurns(), list[str]()

        async def line(name: str) -> None:
            try:
                await turns.take(name)
                tried.append(name)
                await asyncio.sleep(rng.choice((0.0, 0.1, 1.0)))
                if rng.random() < 0.3:
                    turns.refused(rng.choice((0.0, 0.5)))
                elif rng.random() < 0.5:
                    turns.passed(name)
            finally:
                turns.leave(name)

        tasks = list[asyncio.Task[None]]()
        for number in range(200):
            tasks.append(asyncio.create_task(line(str(number))))
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(rng.choice((0.0, 0.1)))
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [error for error in ended if isinstance(error, Exception)]
        assert tried == sorted(tried, key=int), "in their order"
        assert not turns.holds(tried[-1])
        async with asyncio.timeout(100):
            await turns.take("last")

    run_virtually(run())
