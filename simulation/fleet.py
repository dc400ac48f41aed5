"""The simulated backends of an SLA file's pools, and the file as a simulation runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from backends.base import CacheListener
from policies.errors import InvalidRequest
from policies.sla.config import Config
from policies.sla.pools import PoolSpec
from policies.sla.store import StoreSettings
from policies.suggest import did_you_mean
from router.fleet.cluster.names import backend_name
from router.operate.what_if import models_of
from simulation.backend import SimulatedBackend
from simulation.speed import Machine

USUAL_MODEL = "model"
"""Name of the model if neither the file nor the trace names one."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The number of backends in each pool, the machine of each, and the models of pools without one in the file."""

    counts: Mapping[str, int]
    machines: Mapping[str, Machine]
    unnamed: tuple[str, ...]

    def models(self, config: Config) -> list[str]:
        """Every served model, in the order of the pools."""
        served = (name for pool in config.pools.values() for name in self._served(pool))
        return list(dict.fromkeys(served))

    def backends(self, config: Config, listener: CacheListener, clock: Callable[[], float]) -> list[SimulatedBackend]:
        """All backends, new and empty."""
        return list(self._made(config, listener, clock))

    def with_count(self, pool: str, count: int) -> Fleet:
        """A copy with `count` backends in `pool`."""
        return replace(self, counts={**self.counts, pool: count})

    def _made(self, config: Config, listener: CacheListener, clock: Callable[[], float]) -> Iterator[SimulatedBackend]:
        for pool in config.pools.values():
            served = self._served(pool)
            for number in range(self.counts[pool.name]):
                yield SimulatedBackend(
                    backend_name(pool.name, number),
                    pool=pool.name,
                    kind=pool.kind,
                    machine=self.machines[pool.name],
                    models=frozenset(served),
                    model=pool.models.get(served[0], served[0]),
                    listener=listener,
                    clock=clock,
                )

    def _served(self, pool: PoolSpec) -> Sequence[str]:
        return models_of(pool) or self.unnamed


def fleet_of(
    config: Config, machines: Mapping[str, Machine], *, counts: Mapping[str, int], asked_for: Sequence[str] = ()
) -> Fleet:
    """As many backends as `config` names in each pool, or as in `counts`. A pool with discovery has one backend
    unless `counts` has more.

    `asked_for` has the models in requests: pools without a model in the file serve those that no other pool serves.
    Raises InvalidRequest for a pool that the file does not have.
    """
    for name in counts:
        check_pool(name, config)
    named = {model for pool in config.pools.values() for model in models_of(pool)}
    unnamed = tuple(dict.fromkeys(model for model in asked_for if model not in named))
    return Fleet(
        {name: counts.get(name, usual_count(pool)) for name, pool in config.pools.items()},
        machines,
        unnamed or (USUAL_MODEL,),
    )


def usual_count(pool: PoolSpec) -> int:
    """Number of backends in the file; 1 for a pool with discovery."""
    return pool.local or len(pool.at) or 1


def check_pool(name: str, config: Config) -> None:
    """Raises InvalidRequest if `config` has no pool of this name."""
    if name not in config.pools:
        hint = did_you_mean(name, config.pools) or f"known: {', '.join(config.pools)}"
        raise InvalidRequest(f"there is no pool '{name[:80]}'", hint=hint, param="pool")


def with_named_keys(config: Config) -> Config:
    """`config` for a single router, with each tenant's name as its key."""
    keys = {hashlib.sha256(name.encode()).hexdigest(): tenant for name, tenant in config.tenants.items()}
    server = replace(config.server, decision_log=None, keys_file=None)
    return replace(config, tenant_by_key_hash=keys, store=StoreSettings(), server=server)
