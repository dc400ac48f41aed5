"""Bodies are read and parsed within the router's memory, and large ones neither at once nor on the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from policies.errors import Overloaded, RequestTooLarge
from router.call import memory as waiting
from router.call.bodies import SMALL_BYTES, Bodies

MEMORY = 60 * 2**20


def a_body(objects: int) -> bytes:
    return b'{"a":[' + b",".join([b"{}"] * objects) + b"]}"


async def test_a_small_body_is_parsed_at_once_and_a_large_one_in_the_thread() -> None:
    bodies, seen = Bodies(MEMORY), list[int]()

    def read(body: bytes) -> int:
        seen.append(threading.get_ident())
        return len(body)

    with bodies.held("a") as held:
        assert await held.parse(b"{}", read) == 2
    with bodies.held("a") as held:
        assert await held.parse(a_body(5000), read) == len(a_body(5000))
        assert bodies.parsed.lent > 5000 * 1000
    assert seen[0] == threading.get_ident() != seen[1]
    bodies.check()
    bodies.close()


@pytest.mark.parametrize("objects", [15_000, 100_000])
async def test_a_body_that_would_take_more_than_one_request_may_is_refused_unparsed(objects: int) -> None:
    bodies = Bodies(MEMORY)
    body = a_body(objects)
    with bodies.held("a") as held, pytest.raises(RequestTooLarge, match="MiB of memory") as refused:
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
        with bodies.held(tenant) as held:
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
    assert waiting.WAIT_S == 10.0
    with bodies.held("a") as first, bodies.held("a") as second, bodies.held("a") as third, bodies.held("a") as fourth:
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
        with bodies.held("a") as held:
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
    with bodies.held("a") as held:
        with pytest.raises(RequestTooLarge):
            await held.take(2 * 2**20, "it", "none")
        bodies.resize(MEMORY)
        await held.take(2 * 2**20, "it", "none")
    bodies.close()
