"""Faults of a running system: no request is lost, no quota is charged twice, and nothing is left afterwards.

The short form. The long one has all faults, longer, and pairs of them: `make chaos`.
"""

from __future__ import annotations

import sys

import pytest

from tests.chaos.experiment import Times, run
from tests.chaos.faults import BY_NAME, PROCESSES, SERVERS, SHARDS
from tests.chaos.load import Shape
from tests.chaos.system import Plan, a_system

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux'")

SHORT = Times(before=0.4, fault=1.2, after=0.3)


async def prove(plan: Plan, *names: str, shape: Shape = Shape()) -> None:  # noqa: B008
    """Cause the faults of `plan` one after the other; those that are joined by `+` at once."""
    async with a_system(plan) as system:
        for joined in names:
            faults = tuple(BY_NAME[name] for name in joined.split(" + "))
            result = await run(system, faults, SHORT, shape)
            print(result)
            assert not result.violations, str(result)


@pytest.mark.slow("six faults one after the other, and a time of calm behind each")
async def test_faults_of_servers_of_redis_of_the_file_and_of_clients() -> None:
    await prove(
        SERVERS,
        "server killed",
        "server stopped + SLA file half-written",
        "line mute + redis reset",
        "line garbled + clients leave",
        "redis killed + server ended",
    )


async def test_a_process_of_a_router_that_is_killed() -> None:
    await prove(PROCESSES, "worker killed")


@pytest.mark.torch
@pytest.mark.slow("real shards, which take seconds to start again, and a time of calm behind each fault")
async def test_a_shard_that_is_killed() -> None:
    await prove(SHARDS, "shard killed", shape=Shape(per_s=12, most=8))
