"""One pool: turns its addresses, from the file and from sources, into members of the cluster."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Hashable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Membership:
    """What a pool is to have: backends at the addresses `named`, by their names, and at those of the `sources`.

    `make` makes a backend with this name at this address. Backends that were made for another `version` are replaced.
    """

    sources: Mapping[str, Source]
    make: Callable[[str, str], Backend]
    named: Mapping[str, str] = field(default_factory=dict)
    version: Hashable = None


def _make_none(name: str, address: str) -> Backend:
    raise AssertionError(f"{name} at {address} is not wanted")


NOTHING = Membership({}, _make_none)
"""That of a pool that is gone."""


class PoolMembers:
    """Keeps `pool`'s part of the cluster equal to a Membership, which may change.

    The cluster `holds` those that the membership names from the beginning. A backend that is no longer named drains for
    at most `drain_s()` seconds; if it is named again meanwhile, it stays. `on_heard(pool, source, addresses)` gets the
    number of addresses in each answer, `on_failed(pool, source)` each failure: the source's last answer then stays in
    effect.
    """

    def __init__(
        self,
        pool: str,
        membership: Membership,
        *,
        cluster: Cluster,
        drain_s: Callable[[], float],
        rng: random.Random,
        holds: bool = False,
        on_heard: OnHeard = lambda *_: None,
        on_failed: OnFailed = lambda *_: None,
    ) -> None:
        self.pool, self._cluster, self._membership = pool, cluster, membership
        self._drain_s, self._rng = drain_s, rng
        self._on_heard, self._on_failed = on_heard, on_failed
        self._beliefs = {name: Belief(source.patience_s) for name, source in membership.sources.items()}
        self._present: set[str] = set(membership.named) if holds else set()
        self._made = {name: (membership.named[name], membership.version) for name in self._present}
        """Address and version of each backend of the pool that is in the cluster."""
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.began = asyncio.Event()
        """Set when all backends that it is to have were started, since its last change."""
        self._arriving: asyncio.Future[None] | None = None
        self._knows_any = bool(self._present)

    def __repr__(self) -> str:
        return f"<PoolMembers of {self.pool}: {len(self._present)}, and {len(self._removals)} that leave>"

    @property
    def sources(self) -> Mapping[str, Source]:
        """The sources that are to be followed, by name."""
        return self._membership.sources

    @property
    def is_gone(self) -> bool:
        """Whether it has no backend, and is to have none."""
        return self._membership is NOTHING and not self._made

    def change(self, membership: Membership, arriving: asyncio.Future[None]) -> None:
        """Have `membership` from now on. What a source of the same name has answered stays in effect.

        Backends do not leave before `arriving` is done.
        """
        self._membership, self._arriving = membership, arriving
        self.began.clear()
        self._beliefs = {
            name: self._beliefs.get(name) or Belief(source.patience_s) for name, source in membership.sources.items()
        }
        self._changed.set()

    async def follow(self, name: str) -> None:
        """Follow the source `name` until cancelled."""
        source, belief = self._membership.sources[name], self._beliefs[name]
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
        assert not self._present & self._removals.keys(), f"{self!r}: a backend is present and leaving"
        assert all(name in self._cluster for name in self._present), (
            f"{self!r}: a present backend is not in the cluster"
        )

    def _wanted(self) -> dict[str, str]:
        addresses = sorted({address for belief in self._beliefs.values() for address in belief.addresses})
        found = {found_name(self.pool, address): address for address in addresses[:MOST_BACKENDS]}
        return {**self._membership.named, **found}

    async def _reconcile(self) -> None:
        wanted, membership = self._wanted(), self._membership
        # new ones first, so that what leaves is not missed
        changed = [name for name, address in wanted.items() if self._differs(name, address, membership)]
        await asyncio.gather(*(self._have(name, wanted[name], membership) for name in changed))
        if membership is self._membership:
            self.began.set()
        for name in self._present - wanted.keys():
            self._present.remove(name)
            self._removals[name] = asyncio.create_task(self._remove(name), name=f"removal of {name}")
        # backends of the first answer have been running for long and need no slow start
        self._knows_any = self._knows_any or bool(wanted)

    def _differs(self, name: str, address: str, membership: Membership) -> bool:
        return name not in self._present or self._made.get(name) != (address, membership.version)

    async def _have(self, name: str, address: str, membership: Membership) -> None:
        """Have a backend of this name at `address`: the one that is there, if nothing has changed, or another one."""
        removal = self._removals.get(name)
        if removal is not None:
            removal.cancel()
            await asyncio.gather(removal, return_exceptions=True)
            # a task that was cancelled before its first step has not removed itself
            self._removals.pop(name, None)
        made, is_there = (address, membership.version), name in self._cluster
        if not is_there or self._made[name] != made:
            try:
                backend = membership.make(name, address)
            except ConfigError as error:
                _log.warning("%s: %s is left out: %s", self.pool, address, error)
                return
            self._made[name] = made
            if is_there:
                await self._cluster.replace(backend, within_s=self._drain_s())
            else:
                await self._cluster.add(backend, is_cold=self._knows_any)
        self._present.add(name)

    async def _remove(self, name: str) -> None:
        try:
            if self._arriving is not None:
                await asyncio.shield(self._arriving)
            await self._cluster.remove(name, within_s=self._drain_s())
            del self._made[name]
        finally:
            self._removals.pop(name, None)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
