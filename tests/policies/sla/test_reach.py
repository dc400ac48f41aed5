"""Reach, held against asking every kind of request one by one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from policies.nouns import Tenant
from policies.rules import Facts, Range, Rule, When, may_use
from policies.sla import reach
from policies.sla.reach import Reach, TooManyRulesError

CLASSES = ("chat", "rag")
TENANTS = {
    "acme": Tenant("acme", "acme"),
    "labs": Tenant("labs", "labs", classes=frozenset({"rag"}), models=frozenset({"m"})),
}
SIZES = range(7)


def every_request() -> list[Facts]:
    """One request of every kind that rules over small numbers and few words can tell apart."""
    sizes = [(prompt, uncached) for prompt in SIZES for uncached in SIZES if 1 <= uncached <= max(1, prompt)]
    sizes += [(prompt, 0) for prompt in SIZES]
    words: Iterator[tuple[Tenant, str, str | None, str]] = itertools.product(
        TENANTS.values(), ("m", "n", "?"), (*CLASSES, None), ("ads", "?")
    )
    return [
        Facts(
            tenant,
            model,
            prompt_tokens=prompt,
            uncached_tokens=uncached,
            max_new_tokens=1,
            priority=priority,
            metadata={"team": team},
        )
        for (tenant, model, priority, team), (prompt, uncached) in itertools.product(words, sizes)
        if not tenant.models or model in tenant.models
    ]


REQUESTS = every_request()


def some(rng: random.Random, *words: str) -> tuple[str, ...]:
    return tuple(sorted(rng.sample(words, rng.randint(1, len(words))))) if rng.random() < 0.35 else ()


def a_span(rng: random.Random) -> tuple[Range, ...]:
    if rng.random() < 0.5:
        return ()
    least = rng.choice([None, 1, 2, 3])
    return (Range(least, rng.choice([None, 3, 4] if least else [0, 1, 2, 3])),)


def a_rule(rng: random.Random) -> Rule:
    team = some(rng, "ads")
    when = When(
        tenant=some(rng, *TENANTS),
        model=some(rng, "m", "n"),
        priority=some(rng, *CLASSES),
        prompt_tokens=a_span(rng),
        uncached_tokens=a_span(rng),
        metadata=(("team", team),) if team else (),
    )
    return Rule(rng.choice(CLASSES), when)


def takes(rule: Rule, facts: Facts) -> bool:
    return may_use(facts.tenant, rule.service_class) and rule.when.holds(facts)


@pytest.mark.parametrize("seed", range(150))
def test_a_rule_is_reached_exactly_if_some_request_comes_to_it(seed: int) -> None:
    rng = random.Random(seed)
    rules = [a_rule(rng) for _ in range(rng.randint(1, 8))]
    proof = Reach(rules, TENANTS, CLASSES)
    firsts = {next((at for at, rule in enumerate(rules) if takes(rule, facts)), None) for facts in REQUESTS}
    for number, rule in enumerate(rules):
        possible = any(takes(rule, facts) for facts in REQUESTS)
        assert bool(proof.contradiction(number)) is not possible
        if possible:
            takers = proof.takers(number)
            assert bool(takers) is (number not in firsts)
            mine = [facts for facts in REQUESTS if takes(rule, facts)]
            assert not takers or all(any(takes(rules[at], facts) for at in takers) for facts in mine)


@pytest.mark.parametrize("seed", range(150))
def test_every_request_matches_a_rule_exactly_if_none_is_left_over(seed: int) -> None:
    rng = random.Random(seed)
    rules = [a_rule(rng) for _ in range(rng.randint(1, 12))]
    proof = Reach(rules, TENANTS, CLASSES)
    assert bool(proof.unmatched()) is any(not any(rule.when.holds(facts) for rule in rules) for facts in REQUESTS)
    for tenant in TENANTS:
        theirs = [facts for facts in REQUESTS if facts.tenant.name == tenant]
        left = any(not any(takes(rule, facts) for rule in rules) for facts in theirs)
        assert bool(proof.unserved(tenant)) is left


def test_requests_without_a_rule_are_described_in_words() -> None:
    rules = [
        Rule("chat", When(prompt_tokens=(Range(None, 15),))),
        Rule("chat", When(prompt_tokens=(Range(16),), priority=CLASSES)),
        Rule("rag", When(model=("m",))),
    ]
    unmatched = Reach(rules, {"acme": TENANTS["acme"]}, CLASSES).unmatched()
    assert unmatched == "no model that a rule names, no priority that a rule names, prompt_tokens at least 16"


def test_too_many_conditions_to_check_by_hand_end_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_MOST_BOXES", 20)
    rng = random.Random(1)
    names = [f"h{number}" for number in range(12)]
    whens = [When(headers=tuple((name, ("1",)) for name in rng.sample(names, 4))) for _ in range(12)]
    proof = Reach([*(Rule("chat", when) for when in whens), Rule("chat")], TENANTS, CLASSES)
    with pytest.raises(TooManyRulesError):
        proof.takers(12)
    assert Reach([Rule("chat", when) for when in whens], TENANTS, CLASSES).unmatched().startswith("too many")
