"""Explains the decision for a described request from the SLA file alone, with nothing running."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from policies.errors import InvalidRequest
from policies.explain import Explanation, explain
from policies.fetch import with_fetch, with_offers
from policies.learning.cost import prior_of
from policies.nouns import BackendView, Capability, ClusterView, Request, Tenant
from policies.rules import Facts, classify, stated
from policies.sla.config import Config
from policies.sla.pools import BUNDLED, PoolSpec
from policies.suggest import did_you_mean
from router.fleet.cluster.names import backend_name, found_name
from shards.bundled import NAME as BUNDLED_NAME


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A described request. `held_tokens` and `running` are by backend, 0 for backends that are not named.

    `tenant` None: the anonymous tenant. `model` None: the first in the file. `headers` have lower-case names.
    `facts` are values of other facts that rules test, by name; text is read as numbers and booleans.
    """

    prompt_tokens: int
    max_new_tokens: int = 512
    tenant: str | None = None
    model: str | None = None
    priority: str | None = None
    session: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    held_tokens: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)


def explain_on_paper(described: WhatIf, config: Config, live: ClusterView | None = None) -> Explanation:
    """The decision of `config` for that request; ties are broken with a fixed seed.

    Unless `described` or the file says otherwise, backends are well and idle, hold nothing, serve the model and have
    their kind's usual speed; with `live` they are as in that view.
    Raises as `classify` does, and InvalidRequest for names that the file does not have.
    """
    tenant = _tenant(described.tenant, config)
    named = described.model or _first_model(tenant, config)
    model = config.aliases[named].model if named in config.aliases else named
    if live is None:
        view = ClusterView(tuple(_backends(described, model, config)), taken_at=0.0)
    else:
        view = ClusterView(tuple(_as_described(described, live)), live.taken_at)
    most_held = max((backend.held_tokens or 0 for backend in view.backends if model in backend.models), default=0)
    facts = Facts(
        tenant,
        named,
        prompt_tokens=described.prompt_tokens,
        max_new_tokens=described.max_new_tokens,
        uncached_tokens=max(1, described.prompt_tokens - most_held),
        priority=described.priority,
        headers=described.headers,
        metadata=described.metadata,
    )
    facts = stated(facts, described.facts)
    ruling = classify(facts, config)
    request = Request(
        id="what-if",
        tenant=tenant.name,
        model=model,
        domain=tenant.domain,
        prompt_tokens=described.prompt_tokens,
        max_new_tokens=described.max_new_tokens,
        service_class=ruling.service_class.name,
        rank=ruling.rank,
        priority=described.priority,
        pools=ruling.pools,
        policy=ruling.policy,
        session=described.session,
        promised=ruling.service_class,
        may_fetch=True,
    )
    view = with_offers(request, view)
    decision = with_fetch(request, view, config.policies[ruling.policy].decide(request, view, random.Random(0)))
    return explain(request, facts, ruling, config=config, view=view, decision=decision)


def _tenant(name: str | None, config: Config) -> Tenant:
    if name is None:
        if config.anonymous is None:
            hint = f"name the tenant that asks: {', '.join(config.tenants)}"
            raise InvalidRequest("every tenant of this file has a key", hint=hint, param="tenant")
        return config.anonymous
    return config.tenants[_known(name, config.tenants, what="tenant")]


def _first_model(tenant: Tenant, config: Config) -> str:
    named = (name for pool in config.pools.values() for name in models_of(pool))
    return next((name for name in named if not tenant.models or name in tenant.models), min(tenant.models, default="?"))


def models_of(pool: PoolSpec) -> list[str]:
    """Model names of a pool, as far as the file has them: shards report theirs themselves."""
    if pool.kind == "shard":
        return [*pool.models, *([BUNDLED_NAME] if pool.model == BUNDLED else [])]
    return [*([pool.model] if pool.model else []), *pool.models]


def backends_on_paper(model: str, config: Config) -> Iterator[BackendView]:
    """The backends that the file names, well, idle and empty."""
    return _backends(WhatIf(prompt_tokens=0), model, config)


def _backends(described: WhatIf, model: str, config: Config) -> Iterator[BackendView]:
    names = {
        backend_name(pool.name, number): pool
        for pool in config.pools.values()
        for number in range(pool.local or len(pool.at))
    }
    # on paper, discovery has found one backend for each pool
    names |= {found_name(pool.name, "found"): pool for pool in config.pools.values() if pool.is_found}
    for name in (*described.held_tokens, *described.running):
        _known(name, names, what="backend")
    for name, pool in names.items():
        named = models_of(pool)
        yield BackendView(
            name,
            pool=pool.name,
            kind=pool.kind,
            models=frozenset(named or [model]),
            running=described.running.get(name, 0),
            held_tokens=min(described.held_tokens.get(name, 0), described.prompt_tokens),
            capabilities=frozenset(Capability),
            latency=prior_of(pool.kind),
        )


def _as_described(described: WhatIf, live: ClusterView) -> Iterator[BackendView]:
    names = [backend.name for backend in live.backends]
    for name in (*described.held_tokens, *described.running):
        _known(name, names, what="backend")
    for backend in live.backends:
        held = described.held_tokens.get(backend.name)
        yield replace(
            backend,
            running=described.running.get(backend.name, backend.running),
            held_tokens=backend.held_tokens if held is None else min(held, described.prompt_tokens),
        )


def _known(name: str, known: Collection[str], *, what: str) -> str:
    if name not in known:
        hint = did_you_mean(name, known) or f"known: {', '.join(list(known)[:12])}"
        raise InvalidRequest(f"there is no {what} '{name[:80]}'", hint=hint, param=what)
    return name
