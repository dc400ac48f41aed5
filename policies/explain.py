"""Explanations: one record of why a request went where it went, of a real decision or of one on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from policies.compose import Policy
from policies.nouns import BackendView, ClusterView, Decision, Request, ServiceClass
from policies.on_miss import Step
from policies.picks import are_equal
from policies.rules import Facts, Mismatch, Rulebook, Ruling, may_use

_SECRET_FIELDS = ("tenant", "headers.", "metadata.")


class Explained(Rulebook, Protocol):
    """What `explain` needs of a Config."""

    @property
    def policies(self) -> Mapping[str, Policy]:
        """All policies by name."""
        ...

    @property
    def on_miss(self) -> Mapping[str, tuple[Step, ...]]:
        """What follows where a class's target is missed, by its name."""
        ...

    @property
    def version(self) -> str:
        """Which file this is."""
        ...


@dataclass(frozen=True, slots=True)
class Skipped:
    """A rule that came first and did not match. `forbidden`: the tenant may not use its class; no need to look on."""

    rule: int
    service_class: str
    forbidden: bool
    mismatches: tuple[Mismatch, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that passed every filter. `scores` has a value per score, None where it could not tell. `adapter` is
    what it has to do for the LoRA adapter that was asked for, if one was."""

    backend: str
    pool: str
    running: int
    waiting: int
    held_tokens: int | None
    scores: Mapping[str, float | None]
    total: float
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one prompt went where it went. `weights` are those of the policy's scores.

    `counted` are the scores that every candidate has: others do not count. `ruled_class` is the class of the rule;
    `service_class` ranks lower where the caller asked for that; `targets` are its own in seconds, by their names in the
    file, and `on_miss` what follows where they are missed. `equals` are candidates as good as the chosen one.
    `predicted_ttft_s` is what the chosen one was expected to take to the first token. Where `prompt_tokens` is an
    estimate, nine of ten such prompts have as many as the two of `likely_prompt_tokens` and what lies between.
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
    predicted_ttft_s: float | None = None
    likely_prompt_tokens: tuple[int, int] | None = None


def explain(
    request: Request, facts: Facts, ruling: Ruling, *, config: Explained, view: ClusterView, decision: Decision
) -> Explanation:
    """The Explanation of `decision` on `view`, after `ruling` on `facts`; candidates are best first."""
    candidates = sorted(_candidates(view, decision), key=lambda one: -one.total)
    weights = {part.name: part.weight for part in config.policies[ruling.policy].scores}
    best = next((one.total for one in candidates if one.backend == decision.chosen), None)
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
        pools=ruling.pools,
        policy=ruling.policy,
        weights=weights,
        counted=tuple(name for name in weights if all(one.scores.get(name) is not None for one in candidates)),
        dropped=dict(decision.dropped),
        candidates=tuple(candidates),
        equals=tuple(one.backend for one in candidates if best is not None and are_equal(one.total, best)),
        chosen=decision.chosen,
        predicted_ttft_s=decision.predicted_ttft_s,
        likely_prompt_tokens=request.likely_prompt_tokens,
    )


def passed_over(facts: Facts, rulebook: Rulebook, *, before: int) -> Iterator[Skipped]:
    """The rules before number `before`, each with every field that does not hold."""
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
    """`explanation` for the tenant itself: what rules ask of other tenants' names, headers and metadata is left out,
    and backends have the names that `shown_name` gives."""
    skipped = tuple(
        replace(one, mismatches=tuple(_without_wanted(mismatch) for mismatch in one.mismatches))
        for one in explanation.skipped
    )
    return replace(
        explanation,
        skipped=skipped,
        dropped={shown_name(backend): reason for backend, reason in explanation.dropped.items()},
        candidates=tuple(replace(one, backend=shown_name(one.backend)) for one in explanation.candidates),
        equals=tuple(map(shown_name, explanation.equals)),
        chosen=explanation.chosen and shown_name(explanation.chosen),
    )


def _without_wanted(mismatch: Mismatch) -> Mismatch:
    return replace(mismatch, wanted=()) if mismatch.field.startswith(_SECRET_FIELDS) else mismatch


def _candidates(view: ClusterView, decision: Decision) -> Iterator[Candidate]:
    backends: Mapping[str, BackendView] = {backend.name: backend for backend in view.backends}
    scores: dict[str, dict[str, float | None]] = {name: {} for name, _ in decision.scores}
    for name, score, value in decision.details:
        scores[name][score] = value
    for name, total in decision.scores:
        seen = backends[name]
        counts = (seen.running, seen.waiting, seen.held_tokens)
        yield Candidate(name, seen.pool, *counts, scores[name], total, seen.adapter)
