"""Redis fails over, in each way in which it is run, and no router is restarted for it. All servers are real."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from tests.router.shared.redis.parts import HOST, Fleet, Node, Users, a_cluster, sentinels, users


@pytest.fixture(scope="module", params=["sentinels", "cluster"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with sentinels() if request.param == "sentinels" else a_cluster(replicas=True) as fleet:
        yield fleet


async def test_every_part_that_uses_redis_works_there(fleet: Fleet) -> None:
    async with users(fleet.url) as parts:
        assert set((await parts.asked()).values()) == {None}
        await asyncio.gather(*(parts.asked() for _ in range(10)))
        assert not parts.events


async def test_every_part_goes_on_after_a_planned_failover(fleet: Fleet) -> None:
    async with users(fleet.url) as parts:
        await parts.work_again()
        await asyncio.to_thread(fleet.fail_over)
        await parts.work_again()


async def test_every_part_goes_on_after_a_primary_was_killed(fleet: Fleet) -> None:
    async with users(fleet.url) as parts:
        await parts.work_again()
        await asyncio.to_thread(fleet.kill_primary)
        await parts.work_again()


async def test_sentinels_lead_to_a_primary_with_a_password() -> None:
    with sentinels(1, password="p@ss:w") as fleet:
        assert "p%40ss" in fleet.url
        async with users(fleet.url) as parts:
            await parts.work_again()


# redis-py leaves connections to the garbage collector when it forgets a node of a cluster
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_cluster_without_one_of_its_primaries_is_away_until_that_is_restarted() -> None:
    with a_cluster(timeout_ms=300) as fleet:
        async with users(fleet.url) as parts:
            await parts.work_again()
            await asyncio.to_thread(fleet.nodes[1].kill)
            await eventually_fails(parts)
            await asyncio.to_thread(fleet.nodes[1].start)
            await parts.work_again()
    gc.collect()


async def eventually_fails(parts: Users) -> None:
    for _ in range(1000):
        if (await parts.asked())["quotas"] is not None:
            return
        await asyncio.sleep(0.02)
    pytest.fail("Redis goes on without a primary")


async def test_slots_that_move_to_another_primary_are_followed() -> None:
    with a_cluster(2) as fleet:
        async with users(fleet.url) as parts:
            await parts.work_again()
            await asyncio.to_thread(move_all_slots, *fleet.nodes)
            await parts.work_again()
            assert fleet.nodes[0].says("DBSIZE") == 0
            assert not parts.events, "a slot that moves is no fault"


def move_all_slots(source: Node, target: Node) -> None:
    """The slots of `source` that have keys go to `target`, as redis-cli moves them."""
    names = {node: node.says("CLUSTER", "MYID").decode() for node in (source, target)}
    with source.admin() as admin:
        slots = {admin.cluster("KEYSLOT", key.decode()) for key in admin.keys("*")}
    for slot in map(str, sorted(slots)):
        target.says("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        source.says("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        while keys := source.says("CLUSTER", "GETKEYSINSLOT", slot, "100"):
            source.says("MIGRATE", HOST, str(target.port), "", "0", "1000", "KEYS", *(key.decode() for key in keys))
        for node in (target, source):
            node.says("CLUSTER", "SETSLOT", slot, "NODE", names[target])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_cluster_that_was_down_as_a_whole_comes_back() -> None:
    with a_cluster(timeout_ms=300) as fleet:
        async with users(fleet.url) as parts:
            await parts.work_again()
            for node in fleet.nodes:
                await asyncio.to_thread(node.kill)
            assert (await parts.asked())["quotas"] is not None
            for node in fleet.nodes:
                await asyncio.to_thread(node.start)
            await parts.work_again()
    gc.collect()


async def test_a_router_that_starts_while_the_servers_are_away_shares_once_they_are_there() -> None:
    with sentinels(1) as fleet:
        for node in fleet.nodes:
            await asyncio.to_thread(node.kill)
        async with users(fleet.url) as parts:
            assert (await parts.asked())["quotas"] is not None
            for node in fleet.nodes:
                await asyncio.to_thread(node.start)
            await parts.work_again()
