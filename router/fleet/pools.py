"""The backends of the pools of the file in force: those with addresses there, and those that are found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from backends.base import Backend
from backends.kinds import Place, Surroundings, make
from policies.health import HealthRules
from policies.sla.pools import PoolSpec
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.names import backend_name, found_name
from router.fleet.discovery.discovery import Discovery, source_of
from router.fleet.discovery.pool import Membership, PoolMembers
from router.fleet.discovery.registry import Registry
from router.fleet.discovery.source import Source
from router.fleet.feeds.options import backend_options
from tls.certificates import Certificates

ANNOUNCED = "register"
"""Name in metrics of the source of backends that announce themselves."""

Pools = Mapping[str, PoolSpec]


class DiscoveryObserver(Protocol):
    """Receives the pools of the file, and what sources of backends report."""

    def pools(self, may_sleep: Mapping[str, bool]) -> None:
        """The file has these pools now; those that `may_sleep` are started when a request comes."""
        ...

    def discovered(self, pool: str, source: str, addresses: int) -> None:
        """`source` reported this number of addresses for `pool`."""
        ...

    def discovery_failed(self, pool: str, source: str) -> None:
        """`source` failed; its last report stays in effect."""
        ...


class PoolsInForce:
    """Keeps the backends of `cluster` equal to `pools`, which may change while requests run.

    `registries` has the pools that backends announce themselves to. `discovery` runs it all. Where `backends` are
    given, they are there from the beginning, and the addresses in the file are not looked at. Raises ConfigError, also
    for options of backends not found yet.
    """

    def __init__(
        self,
        pools: Pools,
        surroundings: Surroundings,
        cluster: Cluster,
        *,
        drain_s: Callable[[], float],
        observer: DiscoveryObserver,
        on_failure: Callable[[str], None],
        backends: list[Backend] | None = None,
    ) -> None:
        self._cluster, self._drain_s, self._observer = cluster, drain_s, observer
        self._surroundings, self._reads_addresses = surroundings, backends is None
        self.registries: dict[str, Registry] = {}
        self.announced: dict[str, PoolSpec] = {}
        """The pools of `registries`, as the file has them."""
        self._named: tuple[str, ...] = ()
        """Pools that have backends with addresses in the file, or are started when a request comes."""
        memberships = self._memberships(pools, surroundings)
        if backends is None:
            backends = _checked(memberships)
        cluster.hold(backends)
        members = (self._members(pool, membership, holds=True) for pool, membership in memberships.items())
        self.discovery = Discovery(members, on_failure=on_failure)
        self._keep(pools, memberships)

    def __repr__(self) -> str:
        return f"<PoolsInForce {self.discovery!r}>"

    def change(self, pools: Pools, tls: Mapping[str, Certificates]) -> Callable[[], None]:
        """A function that puts `pools` into effect, with the certificates `tls` for their backends.

        New backends start, those that changed are replaced as soon as their successors are there, and others leave when
        their requests have ended. Raises ConfigError, before anything has changed.
        """
        memberships = self._memberships(pools, replace(self._surroundings, tls=tls))
        _checked(memberships)

        def put_into_effect() -> None:
            self._cluster.follow(*rules_of(pools))
            self._keep(pools, memberships)
            self.discovery.change(memberships, self._members, self._cluster.joined)

        return put_into_effect

    def absent(self, pools: Collection[str] | None, there: Collection[str]) -> list[str]:
        """Those of `pools` (None: of all) that are to have backends and are not among the pools that are `there`."""
        return [name for name in self._named if name not in there and (pools is None or name in pools)]

    def check(self) -> None:
        """Assert that each pool has the backends that it is to have."""
        self.discovery.check()

    def _memberships(self, pools: Pools, surroundings: Surroundings) -> dict[str, Membership]:
        prefilling = {pool.prefill for pool in pools.values()}
        return {
            name: Membership(
                self._sources(pool),
                lambda name, address, pool=pool: _backend(pool, name, address, surroundings),  # type: ignore[misc]
                {backend_name(name, number): address for number, address in enumerate(pool.at)}
                if self._reads_addresses
                else {},
                (_essence_of(pool), name in prefilling),
            )
            for name, pool in pools.items()
        }

    def _sources(self, pool: PoolSpec) -> dict[str, Source]:
        sources: dict[str, Source] = {str(at): source_of(at) for at in pool.sources}
        if pool.register:
            ill_s = lambda address: self._cluster.ill_s(found_name(pool.name, address))  # noqa: E731
            sources[ANNOUNCED] = self.registries.get(pool.name) or Registry(self._surroundings.clock, ill_s)
        return sources

    def _members(self, pool: str, membership: Membership, *, holds: bool = False) -> PoolMembers:
        return PoolMembers(
            pool,
            membership,
            cluster=self._cluster,
            drain_s=self._drain_s,
            rng=self._surroundings.rng,
            holds=holds,
            on_heard=self._observer.discovered,
            on_failed=self._observer.discovery_failed,
        )

    def _keep(self, pools: Pools, memberships: Mapping[str, Membership]) -> None:
        self._observer.pools({name: pool.wake is not None for name, pool in pools.items()})
        self._named = tuple(
            pool for pool, membership in memberships.items() if membership.named or pools[pool].wake is not None
        )
        sources = ((pool, membership.sources.get(ANNOUNCED)) for pool, membership in memberships.items())
        self.registries = {pool: source for pool, source in sources if isinstance(source, Registry)}
        self.announced = {pool: pools[pool] for pool in self.registries}


@dataclass(frozen=True, slots=True)
class Effects:
    """What a change of pools does to backends, by name; `pool@` stands for all that a source of the pool finds."""

    start: tuple[str, ...] = ()
    are_replaced: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()


def effects(before: Pools, after: Pools) -> Effects:
    """What becomes of the backends of `before` when the file has the pools `after`."""
    old, new = _versions_of(before), _versions_of(after)
    return Effects(
        tuple(name for name in new if name not in old),
        tuple(name for name in new if name in old and old[name] != new[name]),
        tuple(name for name in old if name not in new),
    )


def _versions_of(pools: Pools) -> dict[str, Hashable]:
    """Each backend that `pools` name, with what makes another backend of it."""
    prefilling = {pool.prefill for pool in pools.values()}
    versions: dict[str, Hashable] = {}
    for name, pool in pools.items():
        version = (_essence_of(pool), name in prefilling)
        versions |= {backend_name(name, number): (address, version) for number, address in enumerate(pool.at)}
        versions |= {found_name(name, ""): version} if pool.is_found else {}
    return versions


def rules_of(pools: Pools) -> tuple[Mapping[str, HealthRules], Mapping[str, str]]:
    """When a backend of each pool counts as ill, and the pools that compute prompts for others."""
    prefill = {pool.name: pool.prefill for pool in pools.values() if pool.prefill is not None}
    return {pool.name: pool.health for pool in pools.values()}, prefill


def _essence_of(pool: PoolSpec) -> PoolSpec:
    """`pool` without what makes no difference to a backend."""
    options = backend_options(pool.options)
    return replace(
        pool, at=(), sources=(), register=False, tokenizer=None, chat_template=None, options=options, wake=None
    )


def _checked(memberships: Mapping[str, Membership]) -> list[Backend]:
    """The backends with addresses in the file, not started. Raises ConfigError, also for wrong options of others."""
    backends = []
    for pool, membership in memberships.items():
        backends += [membership.make(name, address) for name, address in membership.named.items()]
        if membership.sources:
            # report wrong options now, not when the first backend is found
            membership.make(found_name(pool, "nowhere"), "127.0.0.1:1")
    return backends


def _backend(pool: PoolSpec, name: str, address: str, surroundings: Surroundings) -> Backend:
    # a shard reports its model's name itself; its `model` in the file is the checkpoint's path
    own = {pool.model: pool.model} if pool.model is not None and pool.kind != "shard" else {}
    place = Place(
        name=name,
        pool=pool.name,
        address=pool.reachable(address),
        key=pool.key,
        models={**own, **pool.models},
        options=backend_options(pool.options),
    )
    return make(pool.kind, place, surroundings)
