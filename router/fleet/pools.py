"""The backends of the pools: those with addresses in the file, and the discovery of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from backends.base import Backend
from backends.kinds import Place, Surroundings, make
from policies.sla.config import Config, PoolSpec
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.names import backend_name, found_name
from router.fleet.discovery.discovery import Discovery, source_of
from router.fleet.discovery.pool import PoolMembers
from router.fleet.discovery.registry import Registry
from router.fleet.discovery.source import Source
from router.fleet.feeds.options import backend_options

ANNOUNCED = "register"
"""Name in metrics of the source of backends that announce themselves."""


class DiscoveryObserver(Protocol):
    """Receives what sources of backends report."""

    def discovered(self, pool: str, source: str, addresses: int) -> None:
        """`source` reported this number of addresses for `pool`."""
        ...

    def discovery_failed(self, pool: str, source: str) -> None:
        """`source` failed; its last report stays in effect."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """The parts of discovery: `discovery` runs it, `registries` has the pools that backends announce themselves to."""

    discovery: Discovery
    registries: Mapping[str, Registry]


def named_backends(config: Config, surroundings: Surroundings) -> Iterator[Backend]:
    """The backends with addresses in the file. Raises ConfigError, also for options of backends not found yet."""
    for pool in config.pools.values():
        for number, address in enumerate(pool.at):
            yield _backend(pool, backend_name(pool.name, number), address, surroundings)
        if pool.is_found:
            # report wrong options now, not when the first backend is found
            _backend(pool, found_name(pool.name, "nowhere"), "127.0.0.1:1", surroundings)


def finding(
    config: Config,
    surroundings: Surroundings,
    cluster: Cluster,
    *,
    drain_s: Callable[[], float],
    observer: DiscoveryObserver,
    on_failure: Callable[[str], None],
) -> Finding:
    """The discovery for the pools of `config`, which adds backends to `cluster`; not started."""
    registries: dict[str, Registry] = {}
    members = []
    for pool in (each for each in config.pools.values() if each.is_found):
        sources: dict[str, Source] = {str(at): source_of(at) for at in pool.sources}
        if pool.register:
            ill_s = lambda address, pool=pool: cluster.ill_s(found_name(pool.name, address))  # noqa: E731
            sources[ANNOUNCED] = registries[pool.name] = Registry(surroundings.clock, ill_s)
        members.append(
            PoolMembers(
                pool.name,
                sources,
                cluster=cluster,
                make=lambda name, address, pool=pool: _backend(pool, name, address, surroundings),  # type: ignore[misc]
                drain_s=drain_s,
                rng=surroundings.rng,
                on_heard=observer.discovered,
                on_failed=observer.discovery_failed,
            )
        )
    return Finding(Discovery(members, on_failure=on_failure), registries)


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
