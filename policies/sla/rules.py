"""The section `rules`: conditions in order, with the proof that every request matches one and each is reached."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.mirror import Mirror
from policies.nouns import Tenant
from policies.quantities import read_part, read_range, read_reuse, read_share, read_yes
from policies.rules import FACTS, Fact, Rule, When, may_use
from policies.shapes import TEXT, Either, Key, Many, Named, Shape, Table
from policies.sla.fields import Field, Section
from policies.sla.reach import Reach, TooManyRulesError
from policies.split import Split

_FORMS: Mapping[str, Shape] = {"text": Many(TEXT), "number": Many(read_range), "named": Named(Many(TEXT), free=True)}

WHEN = Table({name: Key(_FORMS[fact.form], fact.says) for name, fact in FACTS.items()})
MIRROR = Table(
    {
        "pool": Key(TEXT, "the other pool; its answers are dropped", required=True),
        "share": Key(read_share, "the share of the requests, such as 5%; default 100%"),
    }
)
RULE = Table(
    {
        "when": Key(WHEN, "the condition: every key in it must match, of a list any entry; default always"),
        "class": Key(TEXT, "the service class", required=True),
        "pools": Key(
            Either((Many(TEXT), Named(read_part, free=True))),
            "pools where it may run: names, or any; default any. With shares, {stable: 95, canary: 5}, each request "
            "runs in one of them",
        ),
        "rollback": Key(read_yes, "whether a pool with a smaller share loses it if it does worse; default true"),
        "policy": Key(TEXT, "the policy that chooses a backend; default `default`"),
        "mirror": Key(MIRROR, "another pool that gets a share of the requests too, to compare it; default none"),
        "reuse": Key(read_reuse, "approximate KV of documents: chunks, off, or the share to compute again: 10%"),
    }
)
RULES = Many(RULE, nullable=True)


@dataclass(frozen=True, slots=True)
class Names:
    """The names that rules may refer to."""

    classes: Collection[str]
    tenants: Mapping[str, Tenant]
    pools: Collection[str]
    policies: Collection[str]


def read_rules(field: Field | None, names: Names) -> tuple[Rule, ...]:
    """Rules in order; if the file has none, one that gives every request the first class and any pool."""
    fields = field.items() if field and field.node.value is not None else []
    read = [(entry, rule) for entry in fields if (rule := _read_rule(entry, names)) is not None]
    rules = tuple(rule for _, rule in read) or (Rule(next(iter(names.classes))),)
    # an invalid condition looks like one that always matches
    if field and fields and field.is_sound():
        try:
            _check_reach(field, [entry for entry, _ in read], rules, names)
        except TooManyRulesError:
            field.doubt("there are too many different conditions to prove that each rule is reached")
    return rules


def _read_rule(field: Field, names: Names) -> Rule | None:
    section = field.section(RULE)
    given, policy, chosen = section.get("class"), section.get("policy"), None
    when = _read_when(section.section("when"), names)
    pools, split = _read_pools(section.get("pools"), names, rolls_back=section.read("rollback", True))
    if split is None and (alone := section.get("rollback")) is not None:
        alone.complain("needs pools with shares (write pools: {stable: 95, canary: 5}, or drop it)")
    if policy:
        chosen = policy.one_of(names.policies, what="policy")
    service_class = given.one_of(names.classes, what="class") if given else None
    mirror = _read_mirror(section.get("mirror"), pools, names)
    if service_class is None:
        return None
    return Rule(service_class, when, pools, chosen or "default", split, mirror, section.read("reuse", None))


def _read_mirror(field: Field | None, own: tuple[str, ...] | None, names: Names) -> Mirror | None:
    if field is None:
        return None
    section = field.section(MIRROR)
    given, share = section.get("pool"), section.read("share", 1.0)
    pool = given.one_of(names.pools, what="pool") if given else None
    if given and pool is not None and pool in (own or ()):
        given.complain(f"gets requests of this rule already (name another pool than {', '.join(own or ())})")
    if share == 0:
        section.entries["share"].complain("mirrors nothing (write a share above 0, or drop mirror)")
    return Mirror(pool, share) if pool is not None else None


def _read_when(section: Section, names: Names) -> When:
    return When(**{name: _read_wanted(section, name, fact, names) for name, fact in FACTS.items()})


def _read_wanted(section: Section, name: str, fact: Fact, names: Names) -> tuple[Any, ...]:
    if fact.form == "number":
        return section.read_many(name)
    if fact.form == "named":
        return _read_entries(section.get(name), fact)
    if fact.known == "tenants":
        return section.some_of(name, names.tenants, what="tenant")
    if fact.known == "classes":
        return section.some_of(name, names.classes, what="class")
    return section.texts(name) if fact.known is None else section.some_of(name, fact.known, what=f"value of {name}")


def _read_entries(field: Field | None, fact: Fact) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if field is None or not fact.ignores_case:
        return _read_named(field)
    _refuse_repeated_headers(field)
    return tuple((name.lower(), values) for name, values in _read_named(field))


def _read_named(field: Field | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, entry.texts()) for name, entry in (field.entries() if field else {}).items())


def _refuse_repeated_headers(field: Field) -> None:
    seen: set[str] = set()
    for name, entry in field.entries().items():
        if name.lower() in seen:
            entry.complain("is here twice: headers are the same in upper and lower case (write one list)")
        seen.add(name.lower())


def _read_pools(field: Field | None, names: Names, *, rolls_back: bool) -> tuple[tuple[str, ...] | None, Split | None]:
    """The pools, and how they share the requests."""
    if field is None or field.node.value == "any":
        return None, None
    if not isinstance(field.node.value, dict):
        return field.some_of(names.pools, what="pool"), None
    parts: dict[str, float] = {}
    for pool, entry in field.entries().items():
        if pool not in names.pools:
            entry.complain_of_name(pool, names.pools, what="pool")
        elif (part := entry.read(read_part)) is not None:
            parts[pool] = part
    whole = sum(parts.values())
    if not field.is_sound():
        return tuple(parts), None
    if whole == 0:
        field.complain("no pool has a share (write {stable: 95, canary: 5})")
        return None, None
    shares = tuple((pool, part / whole) for pool, part in parts.items() if part)
    return tuple(pool for pool, _ in shares), Split(shares, rolls_back=rolls_back) if len(shares) > 1 else None


def _check_reach(field: Field, entries: Sequence[Field], rules: Sequence[Rule], names: Names) -> None:
    reach = Reach(rules, names.tenants, list(names.classes))
    if unmatched := reach.unmatched():
        field.complain(f"there are requests that match no rule: {unmatched} (end with one that has no `when`)")
    for number, entry in enumerate(entries):
        if contradiction := reach.contradiction(number):
            entry.complain(f"is never reached: {contradiction} (drop it, or correct its `when`)")
        elif takers := reach.takers(number):
            first = entries[takers[0]]
            others = "".join(f" and {entries[taker].path}" for taker in takers[1:])
            verb = "together take" if others else "takes"
            entry.complain(
                f"is never reached: {first.path} in line {first.node.line}{others} {verb} all its requests "
                "(move it up, or drop it)"
            )
    for tenant in names.tenants.values():
        if not any(may_use(tenant, rule.service_class) and _may_be(tenant, rule.when) for rule in rules):
            hint = f"it may use {', '.join(sorted(tenant.classes))}"
            field.complain(f"no rule gives tenant '{tenant.name}' a class that it may use ({hint})")
        elif not unmatched and (unserved := reach.unserved(tenant.name)):
            field.doubt(
                f"no rule gives these requests a class that their tenant may use, so they are rejected: {unserved}"
            )


def _may_be(tenant: Tenant, when: When) -> bool:
    return not when.tenant or tenant.name in when.tenant
