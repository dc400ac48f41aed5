"""Config: the content of an SLA file, validated and ready to use. Immutable; a changed file makes a new one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

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

_LEAST_SECRET = 8
"""Characters of a secret. Shorter values, such as a password `redis`, are words that errors need."""


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
    secrets: frozenset[str] = field(init=False, compare=False, repr=False, default=frozenset())
    """Keys and passwords for other programs; no client and no log may see them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_wake", any(pool.wake is not None for pool in self.pools.values()))
        object.__setattr__(self, "secrets", frozenset(each for each in self._secrets() if len(each) >= _LEAST_SECRET))

    def _secrets(self) -> Iterator[str]:
        for pool in self.pools.values():
            yield pool.key or ""
            if pool.wake is not None:
                yield pool.wake.secret or ""
                yield pool.wake.url or ""
        urls = [self.store.redis, *self.store.quotas, self.usage and self.usage.store]
        for url in urls:
            yield from _passwords_in(url or "")
        if self.alerts is not None:
            # a reader of the address may post there
            yield self.alerts.webhook
            yield self.alerts.secret or ""
        if self.audit is not None:
            yield self.audit.secret or ""
        if self.batches is not None and (s3 := self.batches.s3) is not None:
            yield s3.access_key or ""
            yield s3.secret_key or ""


def _passwords_in(url: str) -> Iterator[str]:
    """Those in the `url` of a store, as they are spelt there and as they are."""
    try:
        parts = urlsplit(url)
        found = [parts.password, *parse_qs(parts.query).get("password", ())]
    except ValueError:
        return
    for password in filter(None, found):
        yield password
        yield unquote(password)
