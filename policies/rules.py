"""Rules: which service class, pools and policy a request gets. The first rule that matches wins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec

from policies.errors import InvalidRequest, PermissionDenied, UnknownModel
from policies.mirror import Mirror
from policies.nouns import ServiceClass, Tenant
from policies.split import Split
from policies.suggest import did_you_mean


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
        """Whether `number` is within the range."""
        return (self.least is None or number >= self.least) and (self.most is None or number <= self.most)


class Facts(msgspec.Struct, frozen=True):
    """The input of the rules. Names in `headers` are lower case; `priority` is the class that the caller asked for;
    `metadata` is OpenAI's field of that name.

    `uncached_tokens` are the prompt tokens that even the backend with most of the prompt must compute. `stream`: the
    client reads the answer while it is drawn.
    """

    tenant: Tenant
    model: str
    prompt_tokens: int
    max_new_tokens: int
    uncached_tokens: int
    priority: str | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that rules can test: its meaning in the file, its form there, and its value in Facts.

    A `named` fact is a mapping from names to texts; `ignores_case`: its names are compared in lower case. The texts are
    the names of `known` things in the file, or one of these words, or any. `secret`: tenants do not learn which
    values a rule needs. A fact that is not `basic` is a field of Facts with a default: what-if takes it by its name,
    and explanations list it.
    """

    form: Literal["text", "number", "named"]
    says: str
    of: Callable[[Facts], Any]
    known: Literal["tenants", "classes"] | tuple[str, ...] | None = None
    ignores_case: bool = False
    secret: bool = False
    basic: bool = False


def _tested(fact: Fact) -> Any:
    """A field of When that tests `fact`."""
    return field(default=(), metadata={"fact": fact})


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a condition does not match: its `field` needs one of `wanted`, and the request has `found`."""

    field: str
    wanted: tuple[str | Range, ...]
    found: str | int | None


@dataclass(frozen=True, slots=True)
class When:
    """A rule's condition. All fields must match, any entry of one field is enough, an empty field matches.

    This is the table of all facts: the SLA file, its schema and proofs, explanations and what-if read it.
    """

    tenant: tuple[str, ...] = _tested(
        Fact(
            "text",
            "the tenant has this name",
            lambda facts: facts.tenant.name,
            known="tenants",
            secret=True,
            basic=True,
        )
    )
    model: tuple[str, ...] = _tested(
        Fact("text", "the request names this model", lambda facts: facts.model, basic=True)
    )
    priority: tuple[str, ...] = _tested(
        Fact(
            "text",
            "the caller asked for this class (x-pointsman-priority, or the gRPC field)",
            lambda facts: facts.priority,
            known="classes",
            basic=True,
        )
    )
    prompt_tokens: tuple[Range, ...] = _tested(
        Fact(
            "number",
            "the prompt's length is in this range: >= 16k, < 4k, 4k..16k",
            lambda facts: facts.prompt_tokens,
            basic=True,
        )
    )
    uncached_tokens: tuple[Range, ...] = _tested(
        Fact(
            "number",
            "the prompt tokens that no backend holds are in this range",
            lambda facts: facts.uncached_tokens,
            basic=True,
        )
    )
    max_output_tokens: tuple[Range, ...] = _tested(
        Fact(
            "number",
            "the longest answer that the request allows is in this range",
            lambda facts: facts.max_new_tokens,
            basic=True,
        )
    )
    headers: tuple[tuple[str, tuple[str, ...]], ...] = _tested(
        Fact(
            "named",
            "each header named here has this value",
            lambda facts: facts.headers,
            ignores_case=True,
            secret=True,
            basic=True,
        )
    )
    metadata: tuple[tuple[str, tuple[str, ...]], ...] = _tested(
        Fact(
            "named",
            "each entry of the request's metadata has this value",
            lambda facts: facts.metadata,
            secret=True,
            basic=True,
        )
    )
    stream: tuple[str, ...] = _tested(
        Fact(
            "text",
            "the client reads the answer while it is drawn: true or false",
            lambda facts: "true" if facts.stream else "false",
            known=("true", "false"),
        )
    )

    def holds(self, facts: Facts) -> bool:
        """Whether every field matches `facts`."""
        return next(self.mismatches(facts), None) is None

    def mismatches(self, facts: Facts) -> Iterator[Mismatch]:
        """Every field that does not match `facts`, in the order of the reference."""
        for name, fact in FACTS.items():
            wanted = getattr(self, name)
            if not wanted:
                continue
            found = fact.of(facts)
            if fact.form == "named":
                for entry, values in wanted:
                    if found.get(entry) not in values:
                        yield Mismatch(f"{name}.{entry}", values, found.get(entry))
            elif fact.form == "number":
                if not any(span.holds(found) for span in wanted):
                    yield Mismatch(name, wanted, found)
            elif found not in wanted:
                yield Mismatch(name, wanted, found)


FACTS: Mapping[str, Fact] = MappingProxyType({each.name: each.metadata["fact"] for each in fields(When)})
"""All facts by their names in the file, in the order of the reference."""

_STATED = {
    each.name: each.type for each in msgspec.structs.fields(Facts) if each.name in FACTS and not FACTS[each.name].basic
}
"""The types in Facts of the facts that are not basic."""


def stated(facts: Facts, given: Mapping[str, object]) -> Facts:
    """`facts` with the values `given` for facts that are not basic; text is read as numbers and booleans.

    Raises InvalidRequest for an unknown name or a malformed value.
    """
    read: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _STATED:
            hint = did_you_mean(name, _STATED) or f"known: {', '.join(_STATED)}"
            raise InvalidRequest(f"there is no fact '{name[:80]}' to state", hint=hint, param="facts")
        try:
            read[name] = msgspec.convert(value, _STATED[name], strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the fact '{name}' is malformed: {error}", param="facts") from error
    return msgspec.structs.replace(facts, **read)


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests that match `when` get this class, these pools (None: any) and this policy. With a `split`, each request
    goes to one of the pools; with a `mirror`, some are sent to another pool too. `reuse_budget` is that of requests
    with documents which give none; None: the tenant's."""

    service_class: str
    when: When = When()
    pools: tuple[str, ...] | None = None
    policy: str = "default"
    split: Split | None = None
    mirror: Mirror | None = None
    reuse_budget: float | None = None
    matches_all: bool = field(init=False, repr=False, compare=False)
    """Whether `when` has no condition."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "matches_all", self.when == When())


class Ruling(msgspec.Struct, frozen=True):
    """Result of the rules for a request. `rule` is the number of the rule that matched; the first in the file is 1."""

    service_class: ServiceClass
    pools: tuple[str, ...] | None
    policy: str
    rule: int
    reuse_budget: float | None = None

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
    allowed, classes = tenant.classes, rulebook.classes
    if facts.priority is not None:
        _require_known_priority(facts.priority, classes)
    for number, rule in enumerate(rulebook.rules, start=1):
        if (not allowed or rule.service_class in allowed) and (rule.matches_all or rule.when.holds(facts)):
            given = classes[rule.service_class]
            if facts.priority is not None:
                given = _lowered(given, facts.priority, tenant, rule=rule, classes=classes)
            return Ruling(given, rule.pools, rule.policy, number, rule.reuse_budget)
    raise PermissionDenied(
        f"no rule gives tenant '{tenant.name}' a service class for this request",
        hint=f"it may use {', '.join(sorted(tenant.classes))}: ask for one with x-pointsman-priority",
    )


def settled(tenant: Tenant, model: str, rulebook: Rulebook) -> Ruling | None:
    """The Ruling of all requests of `tenant` for `model` without a priority; None if it depends on more of them, or
    there is none."""
    if tenant.models and model not in tenant.models:
        return None
    facts = Facts(tenant, model, prompt_tokens=0, max_new_tokens=0, uncached_tokens=0)
    for number, rule in enumerate(rulebook.rules, start=1):
        when = rule.when
        by_name = When(tenant=when.tenant, model=when.model)
        is_allowed = not tenant.classes or rule.service_class in tenant.classes
        if not is_allowed or when.priority or not by_name.holds(facts):
            continue
        if when != by_name:
            return None
        return Ruling(rulebook.classes[rule.service_class], rule.pools, rule.policy, number, rule.reuse_budget)
    return None


def pools_within_reach(tenant: Tenant, model: str, rulebook: Rulebook) -> frozenset[str] | None:
    """The pools that rules give some request of `tenant` for `model`; None for all pools."""
    found: set[str] = set()
    for rule in rulebook.rules:
        when = rule.when
        if (when.tenant and tenant.name not in when.tenant) or (when.model and model not in when.model):
            continue
        if tenant.classes and rule.service_class not in tenant.classes:
            continue
        if rule.pools is None:
            return None
        found |= set(rule.pools)
        if when == When(tenant=when.tenant, model=when.model):
            # no request goes on to a later rule
            break
    return frozenset(found)


BACKGROUND_RANK = 1 << 16
"""The rank of requests that yield. Our shards know it: they compute nothing for such requests while they compute
prompts of better ranks, and never improve their rank."""

_BACKGROUND_WEIGHT = 1e-3

_BACKGROUND_SLICE = 256
"""Prompt tokens of a request that yields in one step of a shard: a better prompt that arrives waits for no more."""


def yielding(ruling: Ruling, rulebook: Rulebook) -> Ruling:
    """The same pools and policy for background work: it ranks below every class, and every class may preempt it."""
    last = max(rulebook.classes.values(), key=lambda service_class: service_class.rank)
    given = min(_BACKGROUND_SLICE, last.prefill_slice_tokens or _BACKGROUND_SLICE)
    # what they cost does not matter to the placement of other requests
    lowest = replace(
        last, rank=BACKGROUND_RANK, preemptible=True, prefill_slice_tokens=given, weight=_BACKGROUND_WEIGHT
    )
    return msgspec.structs.replace(ruling, service_class=lowest)


def with_targets(ruling: Ruling, ttft_s: float | None, tpot_s: float | None) -> Ruling:
    """`ruling` with the targets that a caller names, in seconds, where its class has none, or tighter ones: as with a
    priority, no caller gets more than the rules give."""
    given = ruling.service_class
    laxer = replace(given, ttft_s=_laxer(given.ttft_s, ttft_s), tpot_s=_laxer(given.tpot_s, tpot_s))
    return msgspec.structs.replace(ruling, service_class=laxer)


def _laxer(of_class: float | None, named: float | None) -> float | None:
    return of_class if named is None else max(named, of_class or 0.0)


def may_use(tenant: Tenant, service_class: str) -> bool:
    """Whether `tenant` may run in `service_class`."""
    return not tenant.classes or service_class in tenant.classes


def _require_known_priority(priority: str, classes: Mapping[str, ServiceClass]) -> None:
    if priority not in classes:
        hint = did_you_mean(priority, classes) or f"the classes are {', '.join(classes)}"
        raise InvalidRequest(f"there is no service class '{priority[:80]}'", hint=hint, param="priority")


def _lowered(
    given: ServiceClass, priority: str, tenant: Tenant, *, rule: Rule, classes: Mapping[str, ServiceClass]
) -> ServiceClass:
    if rule.when.priority or not may_use(tenant, priority):
        return given
    asked = classes[priority]
    return asked if asked.rank > given.rank else given
