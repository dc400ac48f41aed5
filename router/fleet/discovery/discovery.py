"""Follows the pools of a router: their addresses in the file, and their sources."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from policies.sla.sources import DnsName, KubernetesService, SourceName
from router.fleet.discovery.pool import NOTHING, Membership, PoolMembers
from router.fleet.discovery.source import Source
from router.supervise import supervise


class Discovery:
    """Follows every source of every pool. An async context manager: after it is left, none of its tasks runs."""

    def __init__(self, pools: Iterable[PoolMembers], *, on_failure: Callable[[str], None] = lambda _: None) -> None:
        self._pools = {pool.pool: pool for pool in pools}
        self._on_failure = on_failure
        self._tasks: dict[tuple[str, str | None], asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._is_open = False

    def __repr__(self) -> str:
        return f"<Discovery of {', '.join(map(repr, self._pools.values())) or 'none'}>"

    async def __aenter__(self) -> Discovery:
        self._is_open = True
        self._follow()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        tasks = [*self._tasks.values(), *self._ending]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in self._pools.values():
            await pool.close()

    def change(
        self,
        memberships: Mapping[str, Membership],
        make: Callable[[str, Membership], PoolMembers],
        joined: Callable[[], Awaitable[None]],
    ) -> None:
        """Have these pools from now on; `make` makes a new one.

        When all new backends have begun, and `joined` has returned, others leave.
        """
        arriving = asyncio.create_task(self._arrive(joined), name="new backends")
        self._ending.add(arriving)
        arriving.add_done_callback(self._ending.discard)
        for name, pool in tuple(self._pools.items()):
            if name not in memberships:
                if pool.is_gone:
                    del self._pools[name]
                else:
                    pool.change(NOTHING, arriving)
        for name, membership in memberships.items():
            if name in self._pools:
                self._pools[name].change(membership, arriving)
            else:
                self._pools[name] = make(name, membership)
        if self._is_open:
            self._follow()

    def check(self) -> None:
        """Assert the invariants of its pools."""
        for pool in self._pools.values():
            pool.check()

    async def _arrive(self, joined: Callable[[], Awaitable[None]]) -> None:
        for pool in tuple(self._pools.values()):
            await pool.began.wait()
        await joined()

    def _follow(self) -> None:
        """Have one task for each source and each pool, and no others."""
        works: dict[tuple[str, str | None], Callable[[], Awaitable[None]]] = {}
        for pool in self._pools.values():
            works[pool.pool, None] = pool.settle
            for name in pool.sources:
                works[pool.pool, name] = lambda pool=pool, name=name: pool.follow(name)  # type: ignore[misc]
        for key in self._tasks.keys() - works.keys():
            task = self._tasks.pop(key)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for key in [key for key in works if key not in self._tasks]:
            name = f"backends of {key[0]}" if key[1] is None else f"{key[1]} of {key[0]}"
            work = supervise(name, works[key], on_failure=self._on_failure)
            self._tasks[key] = asyncio.create_task(work, name=name)


def source_of(at: SourceName) -> Source:
    """The source for `at`. Each kind of source is imported when it is used."""
    if isinstance(at, KubernetesService):
        from router.fleet.discovery.kubernetes import KubernetesSource

        return KubernetesSource(at)
    from router.fleet.discovery.dns import DnsSource, SrvSource

    return DnsSource(at) if isinstance(at, DnsName) else SrvSource(at)
