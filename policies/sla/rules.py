"""The section `rules`: conditions in order, with the proof that every request matches one and each is reached."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from policies.fields import Field, Section
from policies.nouns import Tenant
from policies.quantities import read_range
from policies.rules import Range, Rule, When, may_use

RULE_KEYS = ("when", "class", "pools", "policy")
WHEN_KEYS = ("tenant", "model", "priority", "prompt_tokens", "uncached_tokens", "max_output_tokens", "headers")


@dataclass(frozen=True, slots=True)
class Names:
    """What rules may refer to."""

    classes: Collection[str]
    tenants: Mapping[str, Tenant]
    pools: Collection[str]
    policies: Collection[str]


def read_rules(field: Field | None, names: Names) -> tuple[Rule, ...]:
    """Rules in order; one that gives every request the first class and any pool where the file has none."""
    fields = field.items() if field and field.node.value is not None else []
    read = [(entry, rule) for entry in fields if (rule := _read_rule(entry, names)) is not None]
    # a condition that could not be read looks like one that always holds
    if field and fields and field.is_sound():
        _check_reach(read, names)
        _check_cover(field, read)
        _check_tenants(field, read, names)
    return tuple(rule for _, rule in read) or (Rule(next(iter(names.classes))),)


def _read_rule(field: Field, names: Names) -> Rule | None:
    section = field.section(RULE_KEYS)
    given, policy = section.get("class"), section.get("policy")
    if given is None:
        field.complain("has no class")
        return None
    when = _read_when(section.section("when", WHEN_KEYS), names)
    pools = _read_pools(section.get("pools"), names)
    chosen = policy.one_of(names.policies, what="policy") if policy else None
    service_class = given.one_of(names.classes, what="class")
    return Rule(service_class, when, pools, chosen or "default") if service_class else None


def _read_when(section: Section, names: Names) -> When:
    headers = section.get("headers")
    return When(
        tenant=section.some_of("tenant", names.tenants, what="tenant"),
        model=section.texts("model"),
        priority=section.some_of("priority", names.classes, what="class"),
        prompt_tokens=_ranges(section.get("prompt_tokens")),
        uncached_tokens=_ranges(section.get("uncached_tokens")),
        max_output_tokens=_ranges(section.get("max_output_tokens")),
        headers=tuple((name.lower(), entry.texts()) for name, entry in (headers.entries() if headers else {}).items()),
    )


def _ranges(field: Field | None) -> tuple[Range, ...]:
    found = [item.read(read_range) for item in field.items()] if field else []
    return tuple(span for span in found if span)


def _read_pools(field: Field | None, names: Names) -> tuple[str, ...] | None:
    if field is None or field.node.value == "any":
        return None
    return field.some_of(names.pools, what="pool")


def _check_reach(read: list[tuple[Field, Rule]], names: Names) -> None:
    for at, (field, rule) in enumerate(read):
        for earlier, first in read[:at]:
            if first.when.covers(rule.when) and _all_may_use(first, rule, names):
                field.complain(f"is never reached: {earlier.path} in line {earlier.node.line} takes all its requests")
                break


def _all_may_use(first: Rule, rule: Rule, names: Names) -> bool:
    """May every tenant that `rule` could serve use the class of `first` too? Else it is skipped for that tenant."""
    users = [tenant for tenant in names.tenants.values() if may_use(tenant, rule.service_class)]
    return all(may_use(tenant, first.service_class) for tenant in users)


def _check_cover(field: Field, read: list[tuple[Field, Rule]]) -> None:
    if read[-1][1].when != When():
        field.complain("there are requests that match no rule (end with one that has no `when`)")


def _check_tenants(field: Field, read: list[tuple[Field, Rule]], names: Names) -> None:
    for tenant in names.tenants.values():
        usable = (may_use(tenant, rule.service_class) and _may_be(tenant, rule.when) for _, rule in read)
        if not any(usable):
            field.complain(f"no rule gives tenant '{tenant.name}' a class that it may use")


def _may_be(tenant: Tenant, when: When) -> bool:
    return not when.tenant or tenant.name in when.tenant
