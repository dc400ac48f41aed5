"""All pools' sources are followed from entering to leaving."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator

from backends.fake import FakeBackend
from router.fleet.cluster.cluster import Cluster
from router.fleet.discovery.discovery import Discovery
from router.fleet.discovery.pool import Membership, PoolMembers
from router.fleet.discovery.source import Addresses
from tests.router.fleet.discovery.parts import virtually


class Lingering:
    """A source whose connection takes a second to close."""

    patience_s = 30.0
    is_open = False

    async def addresses(self) -> AsyncGenerator[Addresses]:
        self.is_open = True
        try:
            yield frozenset({"a:1"})
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            self.is_open = False


def test_after_it_is_left_no_source_has_a_connection_open() -> None:
    async def run() -> None:
        clock, rng = asyncio.get_running_loop().time, random.Random(0)
        sources = [Lingering(), Lingering()]
        async with Cluster(clock=clock, rng=rng) as cluster:
            pools = [
                PoolMembers(
                    pool,
                    Membership({"one": source}, lambda name, _, pool=pool: FakeBackend(name, pool)),  # type: ignore[misc]
                    cluster=cluster,
                    drain_s=lambda: 0.0,
                    rng=rng,
                )
                for pool, source in zip(("own", "far"), sources, strict=True)
            ]
            async with Discovery(pools):
                await asyncio.sleep(0.1)
                assert [source.is_open for source in sources] == [True, True]
            assert [source.is_open for source in sources] == [False, False]

    virtually(run)
