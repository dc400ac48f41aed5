"""Explanations: a record of the reasons for one placement, of a real decision or of a described request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from msgspec.structs import replace as with_fields

from policies.compose import Policy, are_equal
from policies.nouns import BackendView, ClusterView, Decision, Fetch, PrefillLeg, Request, ServiceClass
from policies.on_miss import Step
from policies.predict import MARGINAL_COST, least_cost
from policies.rules import FACTS, Facts, Mismatch, Rulebook, Ruling, may_use


class Explained(Rulebook, Protocol):
    """The part of a Config that `explain` needs."""

    @property
    def policies(self) -> Mapping[str, Policy]:
        """All policies by name."""
        ...

    @property
    def on_miss(self) -> Mapping[str, tuple[Step, ...]]:
        """The steps of each class for missed targets, by its name."""
        ...

    @property
    def version(self) -> str:
        """The version of the file."""
        ...


@dataclass(frozen=True, slots=True)
class Skipped:
    """An earlier rule that did not match. `forbidden`: the tenant may not use its class, so no field was checked."""

    rule: int
    service_class: str
    forbidden: bool
    mismatches: tuple[Mismatch, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that passed every filter. `scores` has a value per score, None if unknown. `adapter` is the
    readiness of the requested LoRA adapter, if the request names one. `cost` has the parts of its marginal cost, if
    the policy counts that: the seconds of each, and their weight. Tenants see no `running`, `waiting`, `scores`,
    `total` and `cost`, which other tenants' requests change."""

    backend: str
    pool: str
    running: int | None
    waiting: int | None
    held_tokens: int | None
    scores: Mapping[str, float | None]
    total: float | None
    adapter: str | None = None
    cost: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons for the placement of one prompt. `weights` are those of the policy's scores.

    `counted` are the scores that every candidate has: others do not count. `ruled_class` is the class of the rule;
    `service_class` ranks lower if the caller asked for that. `targets` are its targets in seconds, by their names in
    the file, and `on_miss` its steps if they are missed. `equals` are candidates with the same total as the chosen one.
    `predicted_ttft_s` is the predicted time to first token at the chosen one. Without a chosen one, the request waits
    for the full backend `awaits` if there is one, although others may have room. `prefill` says which other backend
    computes the prompt, if any, and `fetch` what the chosen one fetches of its KV instead of computing it. If
    `prompt_tokens` is an estimate, the interval `likely_prompt_tokens` holds nine of ten such prompts. `documents` are
    the ids of its documents in the order of the prompt. `shares` are those of the rule's pools, if it has any; then
    `pools` has the one for this request. `facts` are the other facts that a rule of the file tests, by
    name.
    """

    request: str
    config_version: str
    tenant: str
    model: str
    priority: str | None
    prompt_tokens: int
    uncached_tokens: int
    max_output_tokens: int
    rule: int
    skipped: tuple[Skipped, ...]
    ruled_class: str
    service_class: str
    rank: int
    targets: Mapping[str, float]
    on_miss: tuple[str, ...]
    pools: tuple[str, ...] | None
    policy: str
    weights: Mapping[str, float]
    counted: tuple[str, ...]
    dropped: Mapping[str, str]
    candidates: tuple[Candidate, ...]
    equals: tuple[str, ...]
    chosen: str | None
    awaits: str | None = None
    predicted_ttft_s: float | None = None
    likely_prompt_tokens: tuple[int, int] | None = None
    left_out: int = 0
    prefill: PrefillLeg | None = None
    fetch: Fetch | None = None
    documents: tuple[str, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str | int | None] = field(default_factory=dict)


def explain(
    request: Request, facts: Facts, ruling: Ruling, *, config: Explained, view: ClusterView, decision: Decision
) -> Explanation:
    """The Explanation of `decision` on `view`, after `ruling` on `facts`; candidates are best first."""
    totals = dict(decision.scores)
    candidates = sorted(_candidates(request, view, decision), key=lambda candidate: -totals[candidate.backend])
    weights = {part.name: part.weight for part in config.policies[ruling.policy].scores}
    best = None if decision.chosen is None else totals.get(decision.chosen)
    return Explanation(
        request=request.id,
        config_version=config.version,
        tenant=request.tenant,
        model=request.model,
        priority=facts.priority,
        prompt_tokens=request.prompt_tokens,
        uncached_tokens=facts.uncached_tokens,
        max_output_tokens=request.max_new_tokens,
        rule=ruling.rule,
        skipped=tuple(passed_over(facts, config, before=ruling.rule)),
        ruled_class=config.rules[ruling.rule - 1].service_class,
        service_class=ruling.service_class.name,
        rank=ruling.rank,
        targets=dict(_targets(ruling.service_class)),
        on_miss=tuple(map(str, config.on_miss.get(ruling.service_class.name, ()))),
        pools=request.pools,
        shares=dict(split.shares) if (split := config.rules[ruling.rule - 1].split) else {},
        policy=ruling.policy,
        weights=weights,
        counted=tuple(name for name in weights if all(each.scores.get(name) is not None for each in candidates)),
        dropped=dict(decision.dropped),
        candidates=tuple(candidates),
        equals=tuple(each.backend for each in candidates if best is not None and are_equal(totals[each.backend], best)),
        chosen=decision.chosen,
        awaits=decision.awaits,
        predicted_ttft_s=decision.predicted_ttft_s,
        likely_prompt_tokens=request.likely_prompt_tokens,
        left_out=decision.left_out,
        prefill=decision.prefill,
        fetch=decision.fetch,
        documents=request.documents,
        facts={
            name: fact.of(facts)
            for name, fact in FACTS.items()
            if not fact.basic and any(getattr(rule.when, name) for rule in config.rules)
        },
    )


def passed_over(facts: Facts, rulebook: Rulebook, *, before: int) -> Iterator[Skipped]:
    """The rules before number `before`, each with every field that does not match."""
    for number, rule in enumerate(rulebook.rules[: before - 1], start=1):
        forbidden = not may_use(facts.tenant, rule.service_class)
        yield Skipped(number, rule.service_class, forbidden, tuple(rule.when.mismatches(facts)))


def _targets(given: ServiceClass) -> Iterator[tuple[str, float]]:
    if given.ttft_s is not None:
        yield f"ttft_p{given.ttft_quantile * 100:.0f}", given.ttft_s
    if given.tpot_s is not None:
        yield f"tpot_p{given.tpot_quantile * 100:.0f}", given.tpot_s
    if given.deadline_s is not None:
        yield "deadline", given.deadline_s


def without_secrets(explanation: Explanation, shown_name: Callable[[str], str]) -> Explanation:
    """`explanation` for the tenant itself: without the rules' conditions on other tenants' names, headers and metadata,
    without the load that other tenants cause, and with the backend names that `shown_name` gives. The order of the
    candidates and the predicted time to first token stay: they are about this request."""
    leg, fetch = explanation.prefill, explanation.fetch
    skipped = tuple(
        replace(skipped, mismatches=tuple(_without_wanted(mismatch) for mismatch in skipped.mismatches))
        for skipped in explanation.skipped
    )
    return replace(
        explanation,
        skipped=skipped,
        dropped={shown_name(backend): reason for backend, reason in explanation.dropped.items()},
        candidates=tuple(
            replace(each, backend=shown_name(each.backend), running=None, waiting=None, scores={}, total=None, cost={})
            for each in explanation.candidates
        ),
        equals=tuple(map(shown_name, explanation.equals)),
        chosen=explanation.chosen and shown_name(explanation.chosen),
        awaits=explanation.awaits and shown_name(explanation.awaits),
        prefill=leg and with_fields(leg, backend=shown_name(leg.backend)),
        fetch=fetch and with_fields(fetch, backend=shown_name(fetch.backend)),
    )


def _without_wanted(mismatch: Mismatch) -> Mismatch:
    return replace(mismatch, wanted=()) if FACTS[mismatch.field.partition(".")[0]].secret else mismatch


def _candidates(request: Request, view: ClusterView, decision: Decision) -> Iterator[Candidate]:
    backends: Mapping[str, BackendView] = {backend.name: backend for backend in view.backends}
    scores: dict[str, dict[str, float | None]] = {name: {} for name, _ in decision.scores}
    for name, score, value in decision.details:
        scores[name][score] = value
    for name, total in decision.scores:
        seen = backends[name]
        counts = (seen.running, seen.waiting, seen.held_tokens)
        cost = least_cost(request, seen)[0].parts if MARGINAL_COST in scores[name] else {}
        yield Candidate(name, seen.pool, *counts, scores[name], total, seen.adapter, cost)
