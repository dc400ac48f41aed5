"""Config: the content of an SLA file, validated and ready to use. Immutable; a changed file makes a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.aliases import Alias
from policies.compose import Policy
from policies.identity import IdentitySettings
from policies.nouns import ServiceClass, Tenant
from policies.on_miss import Step
from policies.quota.prices import PriceList
from policies.rules import Rule
from policies.sla.alerts import AlertSettings
from policies.sla.audit import AuditSettings
from policies.sla.batches import BatchSettings
from policies.sla.pools import PoolSpec
from policies.sla.server import ServerSettings
from policies.sla.store import StoreSettings
from policies.sla.usage import UsageSettings


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the SLA file decides.

    `classes` are in order of rank. `policies` has the named ones and the file's own. `anonymous` is the tenant of
    requests without a key; None rejects them. `on_miss` has the steps of a class, by its name; requests of other
    classes wait. `ageing_s` is the waiting time after which a request counts as one rank better,
    `outage_s` how long it waits while no backend that could take it is well. `version` changes exactly when the file's
    text does.
    """

    classes: Mapping[str, ServiceClass]
    tenants: Mapping[str, Tenant]
    rules: tuple[Rule, ...]
    policies: Mapping[str, Policy]
    pools: Mapping[str, PoolSpec]
    server: ServerSettings
    version: str
    tenant_by_key_hash: Mapping[str, Tenant]
    anonymous: Tenant | None = None
    prices: PriceList = field(default_factory=PriceList)
    on_miss: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    ageing_s: float = 30.0
    outage_s: float = 10.0
    store: StoreSettings = field(default_factory=StoreSettings)
    usage: UsageSettings | None = None
    alerts: AlertSettings | None = None
    identity: IdentitySettings | None = None
    audit: AuditSettings | None = None
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    batches: BatchSettings | None = None
    has_wake: bool = field(init=False, compare=False, repr=False, default=False)
    """Whether any pool is started when a request comes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_wake", any(pool.wake is not None for pool in self.pools.values()))
