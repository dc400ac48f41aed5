import json
import random
from dataclasses import replace
from typing import Any

from policies.catalogue import builtin_catalogue
from policies.explain import Explanation, explain, passed_over, without_secrets
from policies.nouns import Tenant
from policies.rules import Facts, Mismatch, Range, classify
from policies.sla.config import Config
from policies.sla.parse import parse
from router.protocols.explanations import as_header, as_text
from tests.policies.builders import a_backend, a_cluster, a_request

CONFIG = parse(
    """
classes: {chat: {}, rag: {}, night: {}}
tenants: {acme: {anonymous: true}, labs: {keys: ["sha256:%s"]}}
rules:
  - {when: {tenant: labs, prompt_tokens: [">= 16k", "< 10"]}, class: rag}
  - {when: {headers: {X-Team: ads}, uncached_tokens: 1k..2k}, class: rag}
  - {class: chat}
policies: {default: {score: {cache_overlap: 3, balance: 1}}}
"""
    % ("0" * 64)
)
ACME = Tenant("acme", "acme")


def the_explanation(*backends: Any, config: Config = CONFIG, **what: Any) -> Explanation:
    sizes = {"prompt_tokens": 1000, "max_new_tokens": 100, "uncached_tokens": 500}
    facts = Facts(**{"tenant": ACME, "model": "llama", **sizes, **what})
    ruling = classify(facts, config)
    request, view = a_request(pools=ruling.pools), a_cluster(*backends)
    decision = config.policies[ruling.policy].decide(request, view, random.Random(0))
    return explain(request, facts, ruling, config=config, view=view, decision=decision)


def test_each_earlier_rule_is_explained_field_by_field() -> None:
    explanation = the_explanation(a_backend())
    assert (explanation.rule, explanation.service_class, explanation.ruled_class, explanation.rank) == (
        3,
        "chat",
        "chat",
        0,
    )
    first, second = explanation.skipped
    assert first.mismatches == (
        Mismatch("tenant", ("labs",), "acme"),
        Mismatch("prompt_tokens", (Range(16000), Range(None, 9)), 1000),
    )
    assert second.mismatches == (
        Mismatch("uncached_tokens", (Range(1000, 1999),), 500),
        Mismatch("headers.x-team", ("ads",), None),
    )


def test_a_rule_that_holds_is_passed_over_only_for_a_class_that_the_tenant_may_not_use() -> None:
    tenant = Tenant("labs", "labs", classes=frozenset({"chat"}))
    facts = Facts(tenant, "llama", prompt_tokens=20000, max_new_tokens=1, uncached_tokens=1)
    first, second = passed_over(facts, CONFIG, before=classify(facts, CONFIG).rule)
    assert (first.forbidden, first.mismatches) == (True, ())
    assert second.forbidden
    assert second.mismatches


def test_a_priority_that_lowered_the_rank_is_explained() -> None:
    explanation = the_explanation(a_backend(), priority="night")
    assert (explanation.ruled_class, explanation.service_class, explanation.rank) == ("chat", "night", 2)


def test_candidates_come_best_first_with_every_score_and_drops_with_their_filter() -> None:
    explanation = the_explanation(
        a_backend("a", held_tokens=0), a_backend("b", held_tokens=800, running=2), a_backend("c", healthy=False)
    )
    assert explanation.dropped == {"c": "healthy"}
    assert [candidate.backend for candidate in explanation.candidates] == ["b", "a"] == [explanation.chosen, "a"]
    assert explanation.candidates[0].scores["cache_overlap"] == 0.8
    assert (explanation.candidates[0].running, explanation.candidates[0].held_tokens) == (2, 800)
    assert explanation.weights == {"cache_overlap": 3.0, "balance": 1.0}
    assert explanation.counted == ("cache_overlap", "balance")
    assert explanation.equals == ("b",)


def test_a_score_that_is_not_known_of_all_is_not_counted_and_equals_are_named() -> None:
    explanation = the_explanation(a_backend("a", held_tokens=None), a_backend("b", held_tokens=800))
    assert explanation.counted == ("balance",)
    assert explanation.equals == ("a", "b")


def test_the_parts_of_a_marginal_cost_are_explained_in_seconds() -> None:
    idle, busy = a_backend("a"), a_backend("b", running=3)
    assert all(not each.cost for each in the_explanation(idle, busy).candidates)
    config = replace(CONFIG, policies={"default": builtin_catalogue().policies["default"]})
    explanation = the_explanation(idle, busy, config=config)
    parts = {each.backend: each.cost for each in explanation.candidates}
    assert list(parts) == ["a", "b"]
    assert list(parts["a"]) == ["queue", "fetch", "prefill", "decode", "slowdown", "delay", "eviction"]
    assert parts["a"]["slowdown"] == (0.0, 1.0) < parts["b"]["slowdown"]
    assert all(each.scores.keys() == {"marginal_cost"} for each in explanation.candidates)
    total = sum(seconds * weight for seconds, weight in parts["a"].values())
    assert f"cost      a {total:.3f}: prefill {parts['a']['prefill'][0]:.3f} s x3, decode" in as_text(explanation)
    seen = json.loads(as_header(explanation))["candidates"]
    assert seen[0]["cost"]["prefill"] == [round(parts["a"]["prefill"][0], 3), 3.0]
    tenants = without_secrets(explanation, str)
    assert all(not each.cost for each in tenants.candidates)
    assert "cost      " not in as_text(tenants)
    assert '"cost"' not in as_header(tenants)


def test_if_no_backend_is_left_none_is_chosen() -> None:
    explanation = the_explanation(a_backend(draining=True))
    assert (explanation.chosen, explanation.candidates, explanation.equals) == (None, (), ())


def test_a_tenant_does_not_learn_of_others_from_an_explanation() -> None:
    explanation = without_secrets(the_explanation(a_backend()), str.upper)
    assert [mismatch.wanted for rule in explanation.skipped for mismatch in rule.mismatches] == [
        (),
        (Range(16000), Range(None, 9)),
        (Range(1000, 1999),),
        (),
    ]


def test_a_tenant_does_not_see_the_load_of_others() -> None:
    busy, idle = a_backend("a", running=7, waiting=3), a_backend("b", held_tokens=800)
    operators = the_explanation(busy, idle)
    tenants = without_secrets(operators, str)
    assert {each.running for each in operators.candidates} == {7, idle.running}
    for each in tenants.candidates:
        assert (each.running, each.waiting, each.scores, each.total) == (None, None, {}, None)
    assert [each.backend for each in tenants.candidates] == [each.backend for each in operators.candidates]
    assert [each.held_tokens for each in tenants.candidates] == [each.held_tokens for each in operators.candidates]
    seen = json.loads(as_header(tenants))["candidates"]
    assert [sorted(each) for each in seen] == [["backend", "held_tokens", "pool"]] * 2
    assert "7" not in as_text(tenants).split("candidate")[1].split("chosen")[0]


def test_a_tenant_reads_other_names_of_backends_wherever_they_stand() -> None:
    equal = a_backend("a", held_tokens=None), a_backend("b", held_tokens=800)
    both = the_explanation(*equal, a_backend("c", draining=True))
    explanation = without_secrets(both, str.upper)
    assert (explanation.chosen, explanation.equals, set(explanation.dropped)) == (
        both.chosen and both.chosen.upper(),
        ("A", "B"),
        {"C"},
    )
    assert {candidate.backend for candidate in explanation.candidates} == {"A", "B"}
