"""Discovery for all pools of a router with sources."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from policies.sla.sources import DnsName, KubernetesService, SourceName
from router.fleet.discovery.pool import PoolMembers
from router.fleet.discovery.source import Source
from router.supervise import supervise


class Discovery:
    """Follows every source of every pool. An async context manager: after it is left, none of its tasks runs."""

    def __init__(self, pools: Sequence[PoolMembers], *, on_failure: Callable[[str], None] = lambda _: None) -> None:
        self._pools, self._on_failure = pools, on_failure
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Discovery of {', '.join(map(repr, self._pools)) or 'none'}>"

    async def __aenter__(self) -> Discovery:
        for pool in self._pools:
            for name in pool.sources:
                self._own(f"{name} of {pool.pool}", lambda pool=pool, name=name: pool.follow(name))  # type: ignore[misc]
            self._own(f"backends of {pool.pool}", pool.settle)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in self._pools:
            await pool.close()

    def check(self) -> None:
        """Assert the invariants of its pools."""
        for pool in self._pools:
            pool.check()

    def _own(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(supervise(name, work, on_failure=self._on_failure), name=name))


def source_of(at: SourceName) -> Source:
    """The source for `at`. Each kind of source is imported when it is used."""
    if isinstance(at, KubernetesService):
        from router.fleet.discovery.kubernetes import KubernetesSource

        return KubernetesSource(at)
    from router.fleet.discovery.dns import DnsSource, SrvSource

    return DnsSource(at) if isinstance(at, DnsName) else SrvSource(at)
