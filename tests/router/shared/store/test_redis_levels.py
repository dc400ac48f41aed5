"""Levels in Redis that are kept elsewhere: what is settled counts, whatever is reserved at that moment."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from policies.quota.budget import Refused
from router.shared.store.redis import RedisStore
from router.shared.store.redis_levels import RedisLevels
from tests.policies.builders import a_descriptor, a_reservation
from tests.router.shared.store.parts import RedisServer, a_redis, owed

BUDGET = a_descriptor("a", cost_per_month=1_000, requests_per_minute=50)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


async def test_what_open_reservations_have_is_neither_used_nor_a_meter_of_its_own(server: RedisServer) -> None:
    store = RedisStore(server.url)
    levels = RedisLevels(server.url, namespace="pointsman", clock=time.time)
    settled, is_open = (a_reservation(name, BUDGET, requests=1, cost=300) for name in ("settled", "open"))
    assert not isinstance(await store.reserve(settled), Refused)
    await store.settle_all([owed(settled, settled.charge)])
    assert not isinstance(await store.reserve(is_open), Refused)
    found = await levels.read()
    assert [level.used for level in found if level.name.partition("/")[0] == "open" or level.used in (300, 600)] == [
        300
    ]

    server.clean()
    await levels.resume(found)
    assert [level for level in await store.levels([BUDGET]) if level in (300, 600)] == [300]
    assert {level.name for level in await levels.read()} == {level.name for level in found}
    await store.close()
    await levels.close()
