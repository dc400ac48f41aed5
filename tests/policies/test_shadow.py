"""A second file decides beside the first: only the differences of its decisions are reported."""

import random
from typing import Any

from policies.nouns import Tenant
from policies.rules import Facts, classify
from policies.shadow import Difference, differences
from policies.sla.parse import parse
from tests.policies.builders import a_backend, a_cluster, a_request

POOLS = "pools: {own: {kind: fake, at: ['x:1'], model: llama}, far: {kind: fake, at: ['x:2'], model: llama}}\n"
FIRST = "classes: {chat: {}, batch: {}}\ntenants: {acme: {anonymous: true}}\n" + POOLS
OURS = parse(FIRST + "rules: [{class: chat, pools: [own]}]")
ACME = Tenant("acme", "acme")


def compared(shadow: str, **facts: Any) -> tuple[Difference, ...]:
    seen = Facts(
        **{
            "tenant": ACME,
            "model": "llama",
            "prompt_tokens": 1000,
            "max_new_tokens": 9,
            "uncached_tokens": 1000,
            **facts,
        }
    )
    ruling = classify(seen, OURS)
    request = a_request(service_class="chat", pools=ruling.pools)
    view = a_cluster(a_backend("own-0", running=1), a_backend("far-0", pool="far"))
    decision = OURS.policies[ruling.policy].decide(request, view, random.Random(0))
    return differences(request, seen, ruling, decision, view=view, shadow=parse(shadow))


def test_the_same_file_decides_the_same() -> None:
    assert compared(FIRST + "rules: [{class: chat, pools: [own]}]") == ()


def test_class_pools_policy_and_backend_are_compared() -> None:
    other = FIRST + "rules: [{class: batch, policy: least_load}]"
    assert compared(other) == (
        Difference("class", "chat", "batch"),
        Difference("pools", "own", "any"),
        Difference("policy", "default", "least_load"),
        Difference("backend", "own-0", "far-0"),
    )


def test_which_of_equal_backends_was_drawn_is_no_difference() -> None:
    shadow = FIRST + "policies: {flat: {score: {cache_overlap: 1}}}\nrules: [{class: chat, policy: flat}]"
    assert [difference.what for difference in compared(shadow)] == ["pools", "policy"]


def test_a_request_that_the_shadow_refuses_is_reported_with_the_reason() -> None:
    narrow = FIRST.replace("{anonymous: true}", "{anonymous: true, models: [other]}") + "rules: [{class: chat}]"
    assert compared(narrow) == (Difference("refused", "chat", "model_not_found"),)


def test_a_tenant_that_the_shadow_does_not_have_is_reported() -> None:
    assert compared(FIRST.replace("acme", "labs") + "rules: [{class: chat}]") == (Difference("tenant", "acme", "none"),)
