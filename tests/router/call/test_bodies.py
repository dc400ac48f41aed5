"""Bodies are read and parsed within the router's memory, and large ones neither at once nor on the event loop.

Memory is lent within a bound, in turns, and some of it stays free for a tenant that holds nothing.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

import pytest

from policies.errors import Overloaded, RequestTooLarge
from router.call import bodies as module
from router.call.bodies import SMALL_BYTES, Bodies, Held, Memory

MEMORY = 60 * 2**20


def a_body(objects: int) -> bytes:
    return b'{"a":[' + b",".join([b"{}"] * objects) + b"]}"


A_MEGABYTE_OF_TEXT = b'{"text":"%b"}' % (b'He said \\"{[,\\".\\n' * 2**16)
MANY_TEXTS = b'["' + b'","'.join([b"a"] * 100_000) + b'"]'


@pytest.mark.parametrize(
    ("body", "is_parsed_at_once"),
    [
        (b"{}", True),
        (a_body(5000), False),
        (A_MEGABYTE_OF_TEXT, True),
        (MANY_TEXTS, False),
        (2 * A_MEGABYTE_OF_TEXT, False),
    ],
    ids=["small", "objects", "a long text", "many texts", "a longer text"],
)
async def test_a_body_is_parsed_at_once_if_that_is_quick_and_else_in_the_thread(
    body: bytes, is_parsed_at_once: bool
) -> None:
    bodies, seen = Bodies(10 * MEMORY), list[int]()

    def read(body: bytes) -> int:
        seen.append(threading.get_ident())
        return len(body)

    with Held(bodies, "a") as held:
        await held.arrive(len(body))
        assert await held.parse(body, read) == len(body)
        assert bodies.parsed.lent > 3 * len(body)
        assert not bodies.arriving.lent
    assert (seen == [threading.get_ident()]) == is_parsed_at_once
    bodies.check()
    bodies.close()


@pytest.mark.parametrize("objects", [15_000, 100_000])
async def test_a_body_that_would_take_more_than_one_request_may_is_refused_unparsed(objects: int) -> None:
    bodies = Bodies(MEMORY)
    body = a_body(objects)
    with Held(bodies, "a") as held, pytest.raises(RequestTooLarge, match="MiB of memory") as refused:
        await held.parse(body, lambda _: pytest.fail("was parsed"))
    assert refused.value.hint is not None
    assert "server.memory" in refused.value.hint
    assert (len(body) <= SMALL_BYTES) == (objects == 15_000)
    bodies.check()
    bodies.close()


async def test_bodies_beyond_the_memory_wait_for_others_to_end_and_then_are_parsed() -> None:
    bodies, most = Bodies(MEMORY), 0

    async def call(tenant: str) -> None:
        nonlocal most
        with Held(bodies, tenant) as held:
            await held.arrive(2**20)
            await held.parse(a_body(6000), len)
            most = max(most, bodies.parsed.lent + bodies.arriving.lent)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(call(tenant) for tenant in "ab" * 20))
    assert 6000 * 1000 * 3 < most <= MEMORY
    bodies.check()
    bodies.close()


async def test_a_body_that_never_gets_memory_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = Bodies(MEMORY)
    monkeypatch.setattr(bodies.parsed, "_wait_s", 0.01)
    assert module.WAIT_S == 10.0
    with (
        Held(bodies, "a") as first,
        Held(bodies, "a") as second,
        Held(bodies, "a") as third,
        Held(bodies, "a") as fourth,
    ):
        for held in (first, second, third):
            await held.take(10 * 2**20, "it", "none")
        with pytest.raises(Overloaded) as refused:
            await fourth.parse(a_body(7000), len)
    assert refused.value.retry_after_s is not None
    bodies.check()
    bodies.close()


async def test_a_call_that_is_cancelled_gives_its_memory_back() -> None:
    bodies = Bodies(MEMORY)

    async def call() -> None:
        with Held(bodies, "a") as held:
            await held.arrive(2**20)
            await held.parse(a_body(5000), len)
            await asyncio.sleep(60)

    task = asyncio.create_task(call())
    while not bodies.parsed.lent:  # noqa: ASYNC110 - of the state of another part
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    bodies.check()
    bodies.close()


async def test_a_reloaded_file_changes_the_memory() -> None:
    bodies = Bodies(6 * 2**20)
    with Held(bodies, "a") as held:
        with pytest.raises(RequestTooLarge):
            await held.take(2 * 2**20, "it", "none")
        bodies.resize(MEMORY)
        await held.take(2 * 2**20, "it", "none")
    bodies.close()


def a_memory(most: int = 700, wait_s: float = 60.0) -> Memory:
    return Memory(most, wait_s=wait_s)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_tenant_may_hold_three_quarters_and_each_of_two_three_sevenths() -> None:
    alone = a_memory(400)
    await alone.take("a", 300)
    assert await is_waiting(alone, "a", 1)
    both = a_memory()
    for tenant in ("a", "b") * 30:
        await both.take(tenant, 10)
    assert both.lent == 600
    assert await is_waiting(both, "a", 1)
    assert await is_waiting(both, "b", 1)
    await both.take("c", 75)


async def is_waiting(memory: Memory, tenant: str, size: int) -> bool:
    taking = asyncio.create_task(memory.take(tenant, size))
    await settled()
    waits = not taking.done()
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    return waits


async def test_requests_that_wait_get_memory_in_turns_of_their_tenants() -> None:
    memory, order = a_memory(400), list[str]()
    await memory.take("holder", 300)
    await memory.take("second", 75)

    async def take(tenant: str, name: str) -> None:
        await memory.take(tenant, 30)
        order.append(name)
        memory.give_back(tenant, 30)

    names = ["a1", "a2", "a3", "b1", "b2", "c1"]
    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(take(name[0], name))
        await settled()
        assert (order, memory.waiting) == ([], 6)
        memory.give_back("holder", 300)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    memory.give_back("second", 75)
    memory.check()


async def test_a_request_that_waits_for_too_long_is_refused_and_may_be_sent_again() -> None:
    memory = a_memory(wait_s=0.01)
    await memory.take("a", 500)
    with pytest.raises(Overloaded, match="memory") as refused:
        await memory.take("a", 100)
    assert refused.value.retry_after_s is not None
    memory.give_back("a", 500)
    memory.check()


async def test_a_smaller_request_goes_on_when_a_larger_one_before_it_gives_up() -> None:
    memory = a_memory()
    await memory.take("a", 500)
    large = asyncio.create_task(memory.take("a", 600))
    small = asyncio.create_task(memory.take("a", 10))
    await settled()
    assert not small.done()
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await small
    memory.give_back("a", 510)
    memory.check()


async def test_so_many_requests_may_wait_of_one_tenant_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING_OF_A_TENANT", 2)
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    memory = a_memory()
    await memory.take("holder", 520)
    tasks = [asyncio.create_task(memory.take(tenant, 200)) for tenant in ("a", "a", "a", "b", "b")]
    await settled()
    assert [task.done() for task in tasks] == [False, False, True, False, True]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    memory.give_back("holder", 520)
    memory.check()


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_no_more_is_lent_than_there_is_and_all_of_it_comes_back(seed: int) -> None:
    rng, memory, held = random.Random(seed), a_memory(1000), Counter[str]()

    async def call(tenant: str, size: int) -> None:
        await memory.take(tenant, size)
        held[tenant] += size
        try:
            assert memory.lent <= 1000
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        finally:
            held[tenant] -= size
            memory.give_back(tenant, size)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(300):
        tasks.append(asyncio.create_task(call(rng.choice("abcd"), rng.randrange(1, 125))))
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [error for error in ended if isinstance(error, Exception) and not isinstance(error, Overloaded)]
    assert any(error is None for error in ended)
    assert not held.total()
    memory.check()


async def test_a_larger_memory_is_lent_at_once_to_a_request_that_waits() -> None:
    memory = a_memory(400)
    assert memory.lend("a", 300)
    assert not memory.lend("a", 300)
    taking = asyncio.create_task(memory.take("a", 300))
    await settled()
    assert not memory.lend("a", 1), "it came later"
    memory.resize(4000)
    await taking
    assert memory.lent == 600
    memory.give_back("a", 600)
    memory.check()
    assert memory.lend("a", 0)
    memory.check()
