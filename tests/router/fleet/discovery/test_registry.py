from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from policies.errors import Overloaded
from router.fleet.discovery.registry import MOST, Registry
from tests.router.fleet.discovery.parts import virtually


def test_a_backend_that_does_not_renew_in_time_is_forgotten() -> None:
    async def run() -> None:
        registry = Registry(asyncio.get_running_loop().time)
        async with aclosing(registry.addresses()) as found:
            assert await anext(found) == frozenset()
            registry.register("a:1", ttl_s=30.0)
            registry.register("b:1", ttl_s=30.0)
            assert await anext(found) == {"a:1", "b:1"}
            waiting = asyncio.create_task(anext(found))  # type: ignore[arg-type]
            await asyncio.sleep(20.0)
            registry.register("a:1", ttl_s=30.0)
            assert await waiting == {"a:1"}
            assert 30.0 <= asyncio.get_running_loop().time() <= 32.0

    virtually(run)


def test_a_backend_that_never_renews_is_forgotten_once_it_is_ill_for_good() -> None:
    async def run() -> None:
        ill = {"a:1": 0.0}
        registry = Registry(asyncio.get_running_loop().time, ill.__getitem__)
        registry.register("a:1")
        async with aclosing(registry.addresses()) as found:
            assert await anext(found) == {"a:1"}
            waiting = asyncio.create_task(anext(found))  # type: ignore[arg-type]
            await asyncio.sleep(1000.0)
            ill["a:1"] = 89.0
            await asyncio.sleep(10.0)
            assert not waiting.done()
            ill["a:1"] = 90.0
            assert await waiting == frozenset()

    virtually(run)


def test_the_number_of_announced_backends_is_limited() -> None:
    registry = Registry(lambda: 0.0)
    for number in range(MOST):
        registry.register(f"a:{number}")
    registry.register("a:0")
    with pytest.raises(Overloaded, match="limit"):
        registry.register("one:1")
    assert registry.unregister("a:0")
    registry.register("one:1", ttl_s=5.0)
    assert registry.known()["one:1"] == 5.0


def test_a_backend_is_forgotten_in_time_while_others_come_and_go_all_the_time() -> None:
    async def run() -> None:
        registry = Registry(asyncio.get_running_loop().time)
        registry.register("a:1", ttl_s=30.0)
        async with aclosing(registry.addresses()) as found:
            for number in range(400):
                addresses = await anext(found)
                await asyncio.sleep(0.1)
                registry.register(f"b:{number}", ttl_s=5.0)
            assert "a:1" not in addresses
            assert len(addresses) <= 52, "five seconds of others"

    virtually(run)
