"""Checks of the whole file: names across sections, limits that never apply, parts that are never used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from policies.nouns import ServiceClass
from policies.on_miss import Degrade, Queue, Spill
from policies.roles import OperatorRole
from policies.rules import may_use
from policies.sla.config import Config
from policies.sla.fields import Field
from policies.sla.pools import PoolSpec
from policies.suggest import did_you_mean

S = TypeVar("S", Degrade, Queue, Spill)


def prove(root: Field, config: Config) -> None:
    """Record at `root` and below the mistakes and doubts of `config` as a whole."""
    known = named_models(config.pools)
    if known is not None:
        _doubt_models(root, config, known)
        _check_degraded(root, config, known)
    _check_cycles(root, config)
    _doubt_steps(root, config)
    _doubt_concurrent(root, config)
    _doubt_unused(root, config)
    _doubt_locked_out(root, config)
    _doubt_proxies(root, config)
    _doubt_reuse(root, config)


def named_models(pools: Mapping[str, PoolSpec]) -> frozenset[str] | None:
    """The clients' names of all models; None if a pool takes them from its backends, as shards do."""
    names: set[str] = set()
    for pool in pools.values():
        named = {*pool.models, *([pool.model] if pool.model else [])}
        if pool.kind == "shard" or not named:
            return None
        names |= named
    return frozenset(names)


def _doubt_models(root: Field, config: Config, known: Collection[str]) -> None:
    places: list[tuple[Field, Collection[str]]] = []
    for name, tenant in config.tenants.items():
        places.append((root.find("tenants", name, "models"), sorted(tenant.models)))
        places += [(root.find("tenants", name, "limits", "models", model), (model,)) for model in tenant.model_limits]
    for number, rule in enumerate(config.rules):
        places.append((_rule_field(root, number).find("when", "model"), rule.when.model))
    for field, models in places:
        for model in models:
            if model not in known:
                field.doubt(f"no pool names a model '{model}'{_hint(model, known)}")


def _check_degraded(root: Field, config: Config, known: Collection[str]) -> None:
    for name, at, step in _steps(config, Degrade):
        if step.model not in known:
            _step_field(root, config, name, at).complain(
                f"no pool names a model '{step.model}'{_hint(step.model, known)}"
            )


def _check_cycles(root: Field, config: Config) -> None:
    """Complain if degrading a request leads back to its first model."""
    leads: dict[str, set[str]] = {}
    for rule in config.rules:
        targets = {step.model for step in config.on_miss.get(rule.service_class, ()) if isinstance(step, Degrade)}
        for model in rule.when.model:
            # a request for the target model already just stays there
            leads.setdefault(model, set()).update(targets - {model})
    for name, at, step in _steps(config, Degrade):
        asked = [rule.when.model for rule in config.rules if rule.service_class == name]
        sources = {model for models in asked for model in models} - {step.model}
        field = _step_field(root, config, name, at)
        if asked and all(models == (step.model,) for models in asked):
            field.complain(f"every rule of this class is for '{step.model}' already (degrade to another model)")
        elif found := sorted(sources & _reached(step.model, leads)):
            field.complain(f"'{step.model}' is degraded to '{found[0]}' again, through the rules (break the circle)")


def _reached(model: str, leads: Mapping[str, Collection[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [model]
    while ahead:
        for target in leads.get(ahead.pop(), ()):
            if target not in found:
                found.add(target)
                ahead.append(target)
    return found


def _doubt_steps(root: Field, config: Config) -> None:
    for name in config.on_miss:
        service_class, field = config.classes[name], root.find("on_miss", name)
        leads_on = any(isinstance(step, Spill | Degrade) for step in config.on_miss[name])
        if service_class.ttft_s is None and service_class.deadline_s is None and not leads_on:
            field.doubt("this class has no target for the time to first token and no deadline, so it never misses")
    for name, at, queue in _steps(config, Queue):
        deadline_s = config.classes[name].deadline_s
        if deadline_s is not None and queue.seconds >= deadline_s:
            _step_field(root, config, name, at).doubt("waits longer than the deadline of the class")
    for name, at, spill in _steps(config, Spill):
        rules = [rule for rule in config.rules if rule.service_class == name]
        if rules and all(rule.pools is None or spill.pool in rule.pools for rule in rules):
            field = _step_field(root, config, name, at)
            field.doubt(f"every rule of this class names the pool '{spill.pool}' already, so the step changes nothing")


def _doubt_concurrent(root: Field, config: Config) -> None:
    most = config.server.max_concurrent
    for name, tenant in config.tenants.items():
        for path, limits in [
            ((), tenant.limits),
            *((("models", model), limits) for model, limits in tenant.model_limits.items()),
        ]:
            if limits.concurrent is not None and limits.concurrent > most:
                field = root.find("tenants", name, "limits", *path, "concurrent")
                field.doubt(f"server.max_concurrent is {most:,}, so this is never reached")


def _doubt_unused(root: Field, config: Config) -> None:
    given = {name for name in config.classes if _may_get(config.classes[name], config)}
    for name in config.classes.keys() - given:
        root.find("classes", name).doubt("no rule gives this class, and no priority leads to it")
    spilled = {step.pool for _, _, step in _steps(config, Spill)}
    if all(rule.pools is not None for rule in config.rules):
        named = {pool for rule in config.rules for pool in rule.pools or ()}
        prefill = {pool.prefill for pool in config.pools.values()}
        mirrors = {rule.mirror.pool for rule in config.rules if rule.mirror is not None}
        for name in config.pools.keys() - named - spilled - prefill - mirrors:
            root.find("pools", name).doubt("no rule and no spill names this pool, so nothing runs there")
    for name, pool in config.pools.items():
        if pool.register and config.server.admin is None:
            field = root.find("pools", name, "register")
            field.doubt("backends announce themselves at the operators' port, which is off (write server.admin)")
    policies = root.entries().get("policies")
    for name, field in (policies.entries() if policies else {}).items():
        if not any(rule.policy == name for rule in config.rules):
            field.doubt("no rule uses this policy")


def _may_get(service_class: ServiceClass, config: Config) -> bool:
    """Whether a rule gives it, or gives a better rank that a tenant's priority may lower to it."""
    for rule in config.rules:
        lowers = not rule.when.priority and config.classes[rule.service_class].rank < service_class.rank
        names = rule.when.tenant or tuple(config.tenants)
        users = (config.tenants[name] for name in names)
        if rule.service_class == service_class.name or (
            lowers and any(may_use(user, service_class.name) and may_use(user, rule.service_class) for user in users)
        ):
            return True
    return False


def _steps(config: Config, kind: type[S]) -> Iterator[tuple[str, int, S]]:
    for name, steps in config.on_miss.items():
        yield from ((name, at, step) for at, step in enumerate(steps) if isinstance(step, kind))


def _step_field(root: Field, config: Config, name: str, at: int) -> Field:
    field = root.find("on_miss", name)
    items = field.items()
    return items[at] if len(items) == len(config.on_miss[name]) else field


def _rule_field(root: Field, number: int) -> Field:
    field = root.find("rules")
    items = field.items() if isinstance(field.node.value, list) else [field]
    return items[number] if number < len(items) else field


def _hint(model: str, known: Collection[str]) -> str:
    near = did_you_mean(model, known) or f"known: {', '.join(sorted(known)[:12])}"
    return f" ({near})"


_NEEDS = {
    OperatorRole.OPERATOR: "nothing can be changed there: no drain, weight, reload or key",
    OperatorRole.OWNER: "issued keys, drafts of this file and the audit log are out of reach",
}
"""What is missing at the operators' port where the file has no key or token of this role."""


def _doubt_locked_out(root: Field, config: Config) -> None:
    """Doubt keys and rules that ask every operator for a role, also on this machine, and give none that suffices."""
    server, rules = config.server, () if config.identity is None else config.identity.rules
    keys = {
        digest: server.operators[digest].role if digest in server.operators else OperatorRole.OWNER
        for digest in server.admin_key_hashes
    }
    roles = [*keys.values(), *(rule.role for rule in rules if rule.role is not None)]
    if not roles or max(roles) == OperatorRole.OWNER:
        return
    missing = OperatorRole.OPERATOR if max(roles) < OperatorRole.OPERATOR else OperatorRole.OWNER
    field = root.find("server", "admin_keys") if keys else root.find("identity", "rules")
    field.doubt(
        f"the operators' port asks for a key or token also on this machine, and none of this file is an {missing}'s: "
        f"{_NEEDS[missing]} (write a key with role: owner in server.admin_keys, or a rule of identity with role: owner)"
    )
    if missing == OperatorRole.OPERATOR:
        for name, pool in config.pools.items():
            if pool.register:
                root.find("pools", name, "register").doubt(
                    "backends need the role operator to announce themselves, and this file gives it to no key or token"
                )


def _doubt_proxies(root: Field, config: Config) -> None:
    for number, network in enumerate(config.server.trusted_proxies):
        if network.endswith("/0"):
            field = root.find("server", "trusted_proxies")
            field = field.items()[number] if isinstance(field.node.value, list) else field
            field.doubt("trusts every address, so that each client may write the address that it is counted by")


def _doubt_reuse(root: Field, config: Config) -> None:
    budgets = [(root.find("tenants", name), tenant.reuse_budget) for name, tenant in config.tenants.items()]
    budgets += [(_rule_field(root, number), rule.reuse_budget) for number, rule in enumerate(config.rules)]
    for field, budget in budgets:
        if budget is not None and budget < 1.0:
            field.find("reuse").doubt(
                "is experimental: with chunks, a real model of 0.5B parameters answered 8 of 40 questions about"
                " documents right, and 37 without; measure it on your own model first"
            )
