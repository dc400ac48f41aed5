"""From a name to the model that is served by it, also while its backends are away or asleep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from policies.errors import NoBackend, UnknownModel
from policies.nouns import Tenant
from policies.rules import Facts
from policies.sla.config import Config
from policies.suggest import did_you_mean
from router.ask import Ask
from router.call.disclosure import public_trouble, shown_name
from router.call.waking import Waking
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.served_model import ServedModel

_MOST_SHOWN = 4
"""Backends that a hint names."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of `cluster` by the names that an SLA file and its tenants give them; `waking` starts those that
    sleep."""

    cluster: Cluster
    waking: Waking

    def of(self, tenant: Tenant, config: Config) -> dict[str, ServedModel]:
        """The models that are served now and that `tenant` may use, by name; so are aliases of such models."""
        allowed, served = tenant.models, self.cluster.models()
        aliases = config.aliases.values()
        names = {
            alias.name: replace(served[alias.model], name=alias.name) for alias in aliases if alias.model in served
        }
        return {name: one for name, one in {**served, **names}.items() if not allowed or name in allowed}

    def only(self, tenant: str, config: Config) -> str | None:
        """The name of the one model that the `tenant` may use now; None if there are several, or none."""
        known = config.tenants.get(tenant)
        names = [] if known is None else list(self.of(known, config))
        served = [name for name in names if name not in config.aliases] or names
        return served[0] if len(served) == 1 else None

    def meant(self, name: str | None, tenant: str, config: Config) -> str:
        """`name`, or without one the name of the only model that the `tenant` may use; empty if that is none."""
        return name or self.only(tenant, config) or ""

    def find(self, name: str, tenant: Tenant, config: Config) -> ServedModel:
        """The model that `tenant` means by `name`, which may be an alias. Raises UnknownModel, or NoBackend while its
        backends are away."""
        allowed = not tenant.models or name in tenant.models
        alias = config.aliases.get(name)
        served = name if alias is None else alias.model
        model = self.cluster.model(served)
        if model is not None and allowed:
            return model
        known = self.of(tenant, config)
        if allowed and (self.may_come(served, config) or (not known and self.awaits_backends(config))):
            hint = f"{self._unreached()}try again when /readyz says 200"
            raise NoBackend(f"no backend of model '{name[:80]}' was reached yet", hint=hint, retry_after_s=1.0)
        hint = did_you_mean(name, known) or "GET /v1/models lists the models"
        raise UnknownModel(f"there is no model '{name[:80]}'", hint=hint, param="model")

    def may_come(self, name: str, config: Config) -> bool:
        """Whether backends that were not reached yet may serve `name`: a pool is to have it, or none serves any
        model."""
        is_configured = any(name == pool.model or name in pool.models for pool in config.pools.values())
        return (is_configured or not self.cluster.models()) and self.awaits_backends(config)

    def awaits_backends(self, config: Config) -> bool:
        """Are there backends that were never reached, or pools that have not found any?"""
        pools = self.cluster.pools_ready()
        nowhere = (pool for pool in config.pools.values() if pool.is_found and pool.name not in pools)
        return bool(self.cluster.unreached()) or any(nowhere)

    async def started(self, ask: Ask, tenant: Tenant, config: Config) -> ServedModel:
        """The model of `ask`, as from `find`; if its pool sleeps, once that has started. Raises as `find`, and
        NoBackend if it does not start in time."""
        alias = config.aliases.get(ask.model)
        served, waking = ask.model if alias is None else alias.model, self.waking
        try:
            model = self.find(ask.model, tenant, config)
            # a backend that the file describes may not have been reached yet, so that its context is unknown
            if model.context_tokens is not None or not waking.asleep(served, waking.within_reach(tenant, ask.model)):
                return model
        except (NoBackend, UnknownModel):
            allowed = not tenant.models or ask.model in tenant.models
            if not allowed or not waking.asleep(served, waking.within_reach(tenant, ask.model)):
                raise
        facts = Facts(
            tenant,
            ask.model,
            prompt_tokens=1,
            max_new_tokens=ask.max_new_tokens or 1,
            uncached_tokens=1,
            priority=ask.priority,
            headers=ask.headers,
            metadata=ask.metadata,
            stream=ask.stream,
        )
        await waking.until_served(ask, served, facts, waking.within_reach(tenant, ask.model))
        return self.find(ask.model, tenant, config)

    def _unreached(self) -> str:
        """Why backends were never reached, for clients, as the beginning of a hint."""
        troubles = ((name, self.cluster.trouble(name)) for name in self.cluster.unreached())
        reasons = (f"{shown_name(name)}: {public_trouble(name, trouble)}; " for name, trouble in troubles if trouble)
        return "".join(islice(reasons, _MOST_SHOWN))
