"""A cache domain cleared at every backend that can, and what the router believed of it forgotten."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Tenant
from policies.suggest import did_you_mean
from router.call.gateway import Gateway
from router.call.prepare import roots_of
from router.shared.prefixes.places import keeper_of
from shards.kv.keys import BLOCK_TOKENS

_CANNOT = "it has no command for that: it forgets in its own time, or when it is restarted"


class Cleared(NamedTuple):
    """What was done for one tenant's cache domain. `tenants` share the domain: it was the cache of all of them.

    `backends` has the tokens that each forgot, `failed` why one still has what it had. `prefixes` are kept no more.
    """

    domain: str
    tenants: tuple[str, ...]
    backends: dict[str, int]
    failed: dict[str, str]
    prefixes: tuple[str, ...]

    def shown(self) -> dict[str, Any]:
        """As operators see it."""
        told = [{"backend": name, "cleared": True, "tokens": tokens} for name, tokens in self.backends.items()]
        kept = [{"backend": name, "cleared": False, "message": why} for name, why in self.failed.items()]
        names = {"domain": self.domain, "tenants": list(self.tenants), "prefixes": list(self.prefixes)}
        return {**names, "complete": not self.failed, "backends": [*told, *kept]}


def named_tenant(name: str, gateway: Gateway) -> Tenant:
    """The tenant of this name. Raises InvalidRequest."""
    config = gateway.config
    known = {**config.tenants, **({config.anonymous.name: config.anonymous} if config.anonymous else {})}
    if name not in known:
        hint = did_you_mean(name, known) or f"known: {', '.join(sorted(known)[:12])}"
        raise InvalidRequest(f"there is no tenant '{name[:80]}'", hint=hint, param="tenant")
    return known[name]


async def clear_cache(tenant: Tenant, gateway: Gateway) -> Cleared:
    """Clear the cache domain of `tenant` wherever that can be done.

    Prefixes of the domain go first, so that nobody computes them again. Requests that run go on.
    """
    domain, config = tenant.domain, gateway.config
    dropped = await gateway.prefixes.drop_domain(domain)
    names = list(gateway.cluster.names())
    outcomes = await asyncio.gather(*(_cleared(name, domain, gateway) for name in names))
    done = dict(zip(names, outcomes, strict=True))
    for name, outcome in done.items():
        if isinstance(outcome, int):
            gateway.beliefs.cleared(name)
    gateway.tokenizers.forget(roots_of(domain, gateway))
    sharing = {one.name for one in (*config.tenants.values(), tenant) if one.domain == domain}
    return Cleared(
        domain,
        tuple(sorted(sharing)),
        {name: outcome for name, outcome in done.items() if isinstance(outcome, int)},
        {name: outcome for name, outcome in done.items() if isinstance(outcome, str)},
        tuple(prefix.id for prefix in dropped),
    )


async def _cleared(name: str, domain: str, gateway: Gateway) -> int | str:
    """How many tokens `name` forgot, or why it did not."""
    keeper = keeper_of(name, gateway.cluster)
    if keeper is None:
        return _CANNOT
    try:
        return BLOCK_TOKENS * await keeper.clear_domain(domain)
    except BackendFailed as failure:
        return failure.message
