"""One pool with sources: turns their addresses into members of the cluster."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress

from backends.base import Backend
from backends.reconnect import Backoff
from policies.errors import ConfigError
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.names import found_name
from router.fleet.discovery.belief import Belief
from router.fleet.discovery.source import Source, SourceFailed

_log = logging.getLogger("pointsman.discovery")

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0

MOST_BACKENDS = 4096
"""Most backends of one pool. A source with more is broken, or hostile."""

OnHeard = Callable[[str, str, int], None]
OnFailed = Callable[[str, str], None]


class PoolMembers:
    """Keeps `pool`'s part of the cluster equal to the union of its `sources`, given by name.

    `make` makes a backend with this name at this address. A backend that is no longer named drains for at most
    `drain_s()` seconds; if it is named again meanwhile, it stays. `on_heard(pool, source, addresses)` gets the number
    of addresses in each answer, `on_failed(pool, source)` each failure: the source's last answer then stays in effect.
    """

    def __init__(
        self,
        pool: str,
        sources: Mapping[str, Source],
        *,
        cluster: Cluster,
        make: Callable[[str, str], Backend],
        drain_s: Callable[[], float],
        rng: random.Random,
        on_heard: OnHeard = lambda *_: None,
        on_failed: OnFailed = lambda *_: None,
    ) -> None:
        self.pool, self.sources, self._cluster = pool, sources, cluster
        self._make, self._drain_s, self._rng = make, drain_s, rng
        self._on_heard, self._on_failed = on_heard, on_failed
        self._beliefs = {name: Belief(source.patience_s) for name, source in sources.items()}
        self._present: dict[str, str] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._knows_any = False

    def __repr__(self) -> str:
        return f"<PoolMembers of {self.pool}: {len(self._present)}, and {len(self._removals)} that leave>"

    async def follow(self, name: str) -> None:
        """Follow the source `name` until cancelled."""
        source, belief = self.sources[name], self._beliefs[name]
        backoff = Backoff(self._rng, first_s=_FIRST_BACKOFF_S, longest_s=_LONGEST_BACKOFF_S)
        while True:
            try:
                async with aclosing(source.addresses()) as answers:
                    async for addresses in answers:
                        backoff.reset()
                        belief.hear(addresses, self._now())
                        self._on_heard(self.pool, name, len(addresses))
                        self._changed.set()
            except SourceFailed as failure:
                belief.fail()
                self._on_failed(self.pool, name)
                stay = len(belief.addresses)
                _log.warning("%s: %s failed, its %d addresses stay in effect: %s", self.pool, name, stay, failure)
            await asyncio.sleep(backoff.next_s())

    async def settle(self) -> None:
        """Apply the believed addresses to the cluster, until cancelled."""
        while True:
            self._changed.clear()
            for belief in self._beliefs.values():
                belief.settle(self._now())
            await self._reconcile()
            due_at = min(
                (belief.due_at for belief in self._beliefs.values() if belief.due_at is not None), default=None
            )
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_at):
                    await self._changed.wait()

    async def close(self) -> None:
        """End all drains. Members stay in the cluster."""
        removals = list(self._removals.values())
        for removal in removals:
            removal.cancel()
        await asyncio.gather(*removals, return_exceptions=True)

    def check(self) -> None:
        """Assert that every present backend is in the cluster, and that none of them is leaving."""
        assert not self._present.keys() & self._removals.keys(), f"{self!r}: a backend is present and leaving"
        assert all(name in self._cluster for name in self._present), (
            f"{self!r}: a present backend is not in the cluster"
        )

    def _wanted(self) -> dict[str, str]:
        addresses = sorted({address for belief in self._beliefs.values() for address in belief.addresses})
        return {found_name(self.pool, address): address for address in addresses[:MOST_BACKENDS]}

    async def _reconcile(self) -> None:
        wanted = self._wanted()
        for name in self._present.keys() - wanted.keys():
            del self._present[name]
            self._removals[name] = asyncio.create_task(self._remove(name), name=f"removal of {name}")
        for name in sorted(wanted.keys() - self._present.keys()):
            await self._add(name, wanted[name])
        # backends of the first answer have been running for long and need no slow start
        self._knows_any = self._knows_any or bool(wanted)

    async def _add(self, name: str, address: str) -> None:
        removal = self._removals.get(name)
        if removal is not None:
            removal.cancel()
            await asyncio.gather(removal, return_exceptions=True)
            # a task that was cancelled before its first step has not removed itself
            self._removals.pop(name, None)
        if name not in self._cluster:
            try:
                backend = self._make(name, address)
            except ConfigError as error:
                _log.warning("%s: %s is left out: %s", self.pool, address, error)
                return
            await self._cluster.add(backend, is_cold=self._knows_any)
        self._present[name] = address

    async def _remove(self, name: str) -> None:
        try:
            await self._cluster.remove(name, within_s=self._drain_s())
        finally:
            self._removals.pop(name, None)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
