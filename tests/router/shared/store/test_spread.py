"""Quotas in several Redis: each tenant in one, and one that fails concerns its tenants only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from policies.nouns import Limits
from policies.quota.budget import Charge, Descriptor, Refused, Reservation
from router.shared.store.guarded import GuardedStore, GuardOptions
from router.shared.store.memory import MemoryStore
from router.shared.store.redis import RedisStore
from router.shared.store.spread import SpreadStore
from tests.router.shared.store.parts import RedisServer, a_redis

TENANTS = [f"tenant-{number}" for number in range(300)]
OPTIONS = GuardOptions(replicas=4, deadline_s=1.0, first_backoff_s=60.0)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RedisServer, RedisServer]]:
    with a_redis() as first, a_redis() as second:
        yield first, second


@pytest.fixture(autouse=True)
def _clean(servers: tuple[RedisServer, RedisServer]) -> None:
    for server in servers:
        server.clean()


@asynccontextmanager
async def a_store(*servers: RedisServer) -> AsyncIterator[SpreadStore]:
    """One router's store of quotas."""
    async with AsyncExitStack() as stack:
        guarded = {
            name: GuardedStore(RedisStore(server.url), clock=time.time, options=OPTIONS)
            for name, server in zip("ab", servers, strict=True)
        }
        store = SpreadStore(guarded)
        await store.start()
        stack.push_async_callback(store.close)
        yield store


def of(tenant: str, name: str = "r", requests: int = 1) -> Reservation:
    return Reservation(f"{tenant}-{name}", (Descriptor(tenant, Limits(requests_per_minute=10)),), Charge(requests))


def in_memory(*names: str) -> SpreadStore:
    return SpreadStore({name: MemoryStore(time.time) for name in names})


def test_every_store_has_about_as_many_tenants() -> None:
    counts = Counter(map(in_memory("a", "b", "c").name_for, TENANTS))
    assert min(counts[name] for name in "abc") > 70


def test_the_order_of_the_stores_does_not_matter() -> None:
    assert all(in_memory("a", "b").name_for(tenant) == in_memory("b", "a").name_for(tenant) for tenant in TENANTS)


def test_a_store_that_is_added_moves_only_its_own_tenants() -> None:
    before, after = in_memory("a", "b"), in_memory("a", "b", "c")
    moved = [tenant for tenant in TENANTS if before.name_for(tenant) != after.name_for(tenant)]
    assert {after.name_for(tenant) for tenant in moved} == {"c"}
    assert 70 < len(moved) < 130


async def test_a_limit_holds_for_all_routers(servers: tuple[RedisServer, RedisServer]) -> None:
    async with a_store(*servers) as one, a_store(*servers) as other:
        for tenant in TENANTS[:10]:
            assert isinstance(await one.reserve(of(tenant, requests=6)), Reservation)
            assert isinstance(await other.reserve(of(tenant, "s", requests=6)), Refused)
            # what was not used is given back
            one.settle(of(tenant, requests=6), Charge(1))
    async with a_store(*servers) as third:
        for tenant in TENANTS[:10]:
            assert isinstance(await third.reserve(of(tenant, "t", requests=6)), Reservation)
            left = (await third.standing(of(tenant).descriptors)).requests
            assert left is not None
            assert left.remaining == 3


async def test_a_server_that_fails_concerns_only_its_tenants(servers: tuple[RedisServer, RedisServer]) -> None:
    async with a_store(*servers) as store:
        servers[0].stop()
        of_failed = next(tenant for tenant in TENANTS if store.name_for(tenant) == "a")
        of_other = next(tenant for tenant in TENANTS if store.name_for(tenant) == "b")
        local, shared = await store.reserve(of(of_failed)), await store.reserve(of(of_other))
        assert isinstance(local, Reservation)
        assert isinstance(shared, Reservation)
        assert local.is_local
        assert not shared.is_local


def test_a_request_without_limits_asks_no_store() -> None:
    store = in_memory("a", "b")
    free = Reservation("r", (), Charge(1))
    assert store.reserve(free) is free
    store.settle(free, Charge(1))
