"""Clearing a tenant's cache domain at every backend that can, and in the router's own estimates."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Tenant
from policies.sla.config import Config
from policies.suggest import did_you_mean
from router.call.gateway import Gateway
from router.fleet.cluster.cluster import Cluster
from router.shared.prefixes.places import keeper_of
from shards.kv.keys import BLOCK_TOKENS

_CANNOT = "it has no command for that: its cache is cleared by eviction or a restart"


class Cleared(NamedTuple):
    """The result of clearing one tenant's cache domain. `tenants` share the domain, so all of them lost their cache.

    `backends`: tokens cleared, by backend. `failed`: reason, by backend that still has its cache. `prefixes`: ids of
    the pinned prefixes that were dropped.
    """

    domain: str
    tenants: tuple[str, ...]
    backends: dict[str, int]
    failed: dict[str, str]
    prefixes: tuple[str, ...]

    def shown(self) -> dict[str, Any]:
        """The JSON object of the reply to an operator."""
        cleared = [{"backend": name, "cleared": True, "tokens": tokens} for name, tokens in self.backends.items()]
        kept = [{"backend": name, "cleared": False, "message": why} for name, why in self.failed.items()]
        names = {"domain": self.domain, "tenants": list(self.tenants), "prefixes": list(self.prefixes)}
        return {**names, "complete": not self.failed, "backends": [*cleared, *kept]}


def named_tenant(name: str, config: Config) -> Tenant:
    """The tenant of this name. Raises InvalidRequest."""
    known = {**config.tenants, **({config.anonymous.name: config.anonymous} if config.anonymous else {})}
    if name not in known:
        hint = did_you_mean(name, known) or f"known: {', '.join(sorted(known)[:12])}"
        raise InvalidRequest(f"there is no tenant '{name[:80]}'", hint=hint, param="tenant")
    return known[name]


async def clear_cache(tenant: Tenant, gateway: Gateway) -> Cleared:
    """Clear the cache domain of `tenant` at every backend that can.

    Pinned prefixes of the domain are dropped first, so that no router computes them again. Running requests continue.
    """
    domain, config = tenant.domain, gateway.config
    dropped = await gateway.prefixes.drop_domain(domain)
    names = list(gateway.cluster.names())
    outcomes = await asyncio.gather(*(_cleared(name, domain, gateway.cluster) for name in names))
    done = dict(zip(names, outcomes, strict=True))
    for name, outcome in done.items():
        if isinstance(outcome, int):
            gateway.beliefs.cleared(name)
    roots = gateway.lookup.roots_of(domain, config)
    gateway.tokenizers.forget(roots)
    gateway.document_uses.forget(roots)
    sharing = {member.name for member in (*config.tenants.values(), tenant) if member.domain == domain}
    return Cleared(
        domain,
        tuple(sorted(sharing)),
        {name: outcome for name, outcome in done.items() if isinstance(outcome, int)},
        {name: outcome for name, outcome in done.items() if isinstance(outcome, str)},
        tuple(prefix.id for prefix in dropped),
    )


async def _cleared(name: str, domain: str, cluster: Cluster) -> int | str:
    """Number of tokens that backend `name` cleared, or the reason why it did not."""
    keeper = keeper_of(name, cluster)
    if keeper is None:
        return _CANNOT
    try:
        return BLOCK_TOKENS * await keeper.clear_domain(domain)
    except BackendFailed as failure:
        return failure.message
