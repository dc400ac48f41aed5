"""Rules: which service class, pools and policy a request gets. The first rule that matches wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from policies.errors import InvalidRequest, PermissionDenied, UnknownModel
from policies.nouns import ServiceClass, Tenant
from policies.suggest import did_you_mean


class Facts(msgspec.Struct, frozen=True):
    """The input of the rules. Names in `headers` are lower case; `priority` is the class that the caller asked for;
    `metadata` is OpenAI's field of that name.

    `uncached_tokens` are the prompt tokens that even the backend with most of the prompt must compute.
    """

    tenant: Tenant
    model: str
    prompt_tokens: int
    max_new_tokens: int
    uncached_tokens: int
    priority: str | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` up to and including `most`; None is unbounded."""

    least: int | None = None
    most: int | None = None

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least:,} to {self.most:,}"
        return f"at most {self.most:,}" if self.least is None else f"at least {self.least:,}"

    def holds(self, number: int) -> bool:
        """Is `number` within?"""
        return (self.least is None or number >= self.least) and (self.most is None or number <= self.most)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a condition does not match: its `field` needs one of `wanted`, and the request has `found`."""

    field: str
    wanted: tuple[str | Range, ...]
    found: str | int | None


@dataclass(frozen=True, slots=True)
class When:
    """A rule's condition. All fields must match, any entry of one field is enough, an empty field matches."""

    tenant: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    priority: tuple[str, ...] = ()
    prompt_tokens: tuple[Range, ...] = ()
    uncached_tokens: tuple[Range, ...] = ()
    max_output_tokens: tuple[Range, ...] = ()
    headers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    metadata: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def holds(self, facts: Facts) -> bool:
        """Does every field match `facts`?"""
        return next(self.mismatches(facts), None) is None

    def mismatches(self, facts: Facts) -> Iterator[Mismatch]:
        """Every field that does not match `facts`, in the order of the reference."""
        texts = (
            ("tenant", self.tenant, facts.tenant.name),
            ("model", self.model, facts.model),
            ("priority", self.priority, facts.priority),
        )
        for field_name, wanted, text in texts:
            if wanted and text not in wanted:
                yield Mismatch(field_name, wanted, text)
        numbers = (
            ("prompt_tokens", self.prompt_tokens, facts.prompt_tokens),
            ("uncached_tokens", self.uncached_tokens, facts.uncached_tokens),
            ("max_output_tokens", self.max_output_tokens, facts.max_new_tokens),
        )
        for field_name, spans, number in numbers:
            if spans and not any(span.holds(number) for span in spans):
                yield Mismatch(field_name, spans, number)
        named = (("headers", self.headers, facts.headers), ("metadata", self.metadata, facts.metadata))
        for field_name, entries, found in named:
            for name, values in entries:
                if found.get(name) not in values:
                    yield Mismatch(f"{field_name}.{name}", values, found.get(name))


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests that match `when` get this class, these pools (None: any) and this policy."""

    service_class: str
    when: When = When()
    pools: tuple[str, ...] | None = None
    policy: str = "default"


class Ruling(msgspec.Struct, frozen=True):
    """Result of the rules for a request. `rule` is the number of the rule that matched; the first in the file is 1."""

    service_class: ServiceClass
    pools: tuple[str, ...] | None
    policy: str
    rule: int

    @property
    def rank(self) -> int:
        """The rank of its class; 0 is served first."""
        return self.service_class.rank


class Rulebook(Protocol):
    """The part of a Config that `classify` needs."""

    @property
    def classes(self) -> Mapping[str, ServiceClass]:
        """All service classes by name."""
        ...

    @property
    def rules(self) -> tuple[Rule, ...]:
        """In the order of the file."""
        ...


def classify(facts: Facts, rulebook: Rulebook) -> Ruling:
    """Class, pools and policy for a request, from the first rule that matches and has a class that its tenant may use.

    The caller's priority can lower the rule's rank, never raise it. If the matching rule has a condition on the
    priority, the rule's class holds. Raises UnknownModel if the tenant may not use the model, InvalidRequest if the
    priority names no class, PermissionDenied if no rule is left.
    """
    tenant = facts.tenant
    if tenant.models and facts.model not in tenant.models:
        raise UnknownModel(
            f"there is no model '{facts.model}' for tenant '{tenant.name}'",
            hint=f"it may use {', '.join(sorted(tenant.models))}",
            param="model",
        )
    _require_known_priority(facts.priority, rulebook.classes)
    for number, rule in enumerate(rulebook.rules, start=1):
        if may_use(tenant, rule.service_class) and rule.when.holds(facts):
            given = _lowered(rulebook.classes[rule.service_class], facts, rule=rule, classes=rulebook.classes)
            return Ruling(given, rule.pools, rule.policy, number)
    raise PermissionDenied(
        f"no rule gives tenant '{tenant.name}' a service class for this request",
        hint=f"it may use {', '.join(sorted(tenant.classes))}: ask for one with x-pointsman-priority",
    )


def yielding(ruling: Ruling, rulebook: Rulebook) -> Ruling:
    """The same pools and policy for background work: it ranks below every class, and every class may preempt it."""
    last = max(rulebook.classes.values(), key=lambda service_class: service_class.rank)
    return msgspec.structs.replace(ruling, service_class=replace(last, rank=last.rank + 1, preemptible=True))


def may_use(tenant: Tenant, service_class: str) -> bool:
    """May `tenant` run in `service_class`?"""
    return not tenant.classes or service_class in tenant.classes


def _require_known_priority(priority: str | None, classes: Mapping[str, ServiceClass]) -> None:
    if priority is None or priority in classes:
        return
    hint = did_you_mean(priority, classes) or f"the classes are {', '.join(classes)}"
    raise InvalidRequest(f"there is no service class '{priority[:80]}'", hint=hint, param="priority")


def _lowered(given: ServiceClass, facts: Facts, *, rule: Rule, classes: Mapping[str, ServiceClass]) -> ServiceClass:
    if facts.priority is None or rule.when.priority or not may_use(facts.tenant, facts.priority):
        return given
    asked = classes[facts.priority]
    return asked if asked.rank > given.rank else given
