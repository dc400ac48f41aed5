"""A decision scores all backends of a small fleet, and a shortlist of a large one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from backends.base import Description, Load
from backends.fake import FakeBackend
from policies.explain import explain
from policies.nouns import ClusterView, Decision
from policies.rules import Facts, Ruling
from policies.shortlist import HOLDERS, IDLEST, LARGE, OTHERS
from policies.sla.parse import parse
from router.call.bid import Look
from router.call.gateway import Gateway
from router.start.build import build
from tests.policies.builders import a_request

SLA = """
classes: {chat: {ttft_p95: 800ms}}
tenants: {acme: {anonymous: true}}
rules: [{class: chat}]
policies:
  unscored: {filter: [healthy]}
  spread: {score: {balance: 1}, pick: {best_of: {sample: 3}}}
  unlimited: {filter: [healthy, serves_model, fits_context, has_room], score: {balance: 1}}
  shortest: {score: {expected_ttft: 1}}
"""
REACHED = Description(
    frozenset({"llama", "legal"}),
    context_tokens=8000,
    reports_cache=True,
    adapters=frozenset({"legal"}),
    tuned=frozenset({"legal"}),
)


@dataclass
class Reporting(FakeBackend):
    """A fake that reports its cache."""

    def describe(self) -> Description | None:
        return REACHED


def a_gateway(backends: int, **reported: Any) -> Gateway:
    made = [Reporting(f"b{number}", "own", reported=Load(**reported)) for number in range(backends)]
    gateway = build(parse(SLA), backends=lambda _: made, clock=lambda: 1.0, rng=random.Random(1)).gateway
    for member in gateway.cluster._members.values():
        member.probed(None, now=0.0)
    return gateway


def decide(gateway: Gateway, policy: str = "default", **what: Any) -> tuple[ClusterView, Decision]:
    fields = {"held": {}, **{name: what.pop(name) for name in ("held", "avoiding", "look") if name in what}}
    return gateway.decider.decide(a_request(**what), gateway.config.policies[policy], **fields)


def test_all_backends_of_a_small_fleet_are_scored() -> None:
    gateway = a_gateway(LARGE)
    state = gateway.rng.getstate()
    view, decision = decide(gateway, held={"b7": 1000})
    assert (len(view.backends), view.left_out, decision.left_out) == (LARGE, 0, 0)
    assert decision.chosen == "b7"
    assert gateway.rng.getstate() == state, "nothing is drawn where nothing is left out"


def test_a_shortlist_of_a_large_fleet_is_scored_and_the_decision_says_so() -> None:
    gateway = a_gateway(1000)
    view, decision = decide(gateway, held={"b777": 1000})
    assert decision.chosen == "b777"
    assert len(view.backends) <= HOLDERS + IDLEST + OTHERS
    assert len(view.backends) + view.left_out == 1000
    assert decision.left_out == view.left_out


@pytest.mark.parametrize("policy", ["session_hash", "round_robin", "power_of_two", "unscored", "spread", "unlimited"])
def test_a_policy_that_has_to_choose_among_all_is_given_all(policy: str) -> None:
    view, decision = decide(a_gateway(200), policy)
    assert (len(view.backends), decision.left_out) == (200, 0)


@pytest.mark.parametrize("policy", ["default", "least_load", "shortest"])
def test_other_policies_are_given_a_shortlist(policy: str) -> None:
    assert decide(a_gateway(200), policy)[1].left_out > 0


def test_all_are_scored_if_none_of_the_shortlist_can_take_the_request() -> None:
    gateway = a_gateway(200, running=8, waiting=0, max_requests=8)
    view, decision = decide(gateway, "least_load")
    assert decision.chosen is None
    assert (len(view.backends), decision.left_out) == (200, 0)
    assert decision.dropped == tuple((f"b{number}", "under_limit") for number in range(200))


def test_a_shortlist_has_full_backends_that_hold_the_prompt_where_the_policy_waits_for_the_best() -> None:
    gateway = a_gateway(200, running=8, waiting=0, max_requests=8)
    _, decision = decide(gateway, held={"b7": 1000})
    assert (decision.chosen, decision.awaits) == (None, "b7")
    assert decision.left_out > 0
    _, decision = decide(gateway, held={"b7": 1000}, look=Look(takes_any=True))
    assert (decision.chosen, decision.awaits, decision.left_out) == (None, None, 0)


def test_the_only_backend_that_can_take_it_is_found_wherever_it_is() -> None:
    gateway = a_gateway(500)
    for number in range(500):
        if number != 321:
            gateway.cluster.drain(f"b{number}")
    assert decide(gateway)[1].chosen == "b321"
    gateway.cluster.drain("b321")
    assert decide(gateway)[1].chosen is None
    gateway.cluster.drain("b5", False)
    assert decide(gateway)[1].chosen == "b5"


def test_backends_that_failed_the_request_are_not_chosen_again() -> None:
    _, decision = decide(a_gateway(200), held={"b9": 1000, "b8": 900}, avoiding={"b9"})
    assert decision.chosen == "b8"


@pytest.mark.parametrize(
    "all_backends",
    [{"look": Look(all_backends=True)}, {"least_prompt_tokens": 10, "likely_prompt_tokens": (20, 7990)}],
)
def test_all_are_scored_on_demand_and_for_an_estimate_that_may_exceed_a_context(all_backends: dict[str, Any]) -> None:
    assert len(decide(a_gateway(200), **all_backends)[0].backends) == 200


def test_a_shortlist_is_scored_for_an_estimate_that_fits_every_context() -> None:
    assert decide(a_gateway(200), least_prompt_tokens=10, likely_prompt_tokens=(20, 2000))[1].left_out > 0


def test_all_are_scored_for_an_adapter_until_a_candidate_has_it_ready() -> None:
    gateway = a_gateway(500)
    ready = gateway.cluster.backend("b321")
    assert isinstance(ready, Reporting)
    ready.reported = Load(active_adapters=frozenset({"legal"}))
    _, decision = decide(gateway, model="legal")
    assert (decision.chosen, decision.left_out) == ("b321", 0)
    _, decision = decide(gateway, model="legal", held={"b321": 1000})
    assert decision.chosen == "b321"
    assert decision.left_out > 0


def test_a_shadow_file_chooses_among_the_same() -> None:
    gateway = a_gateway(200)
    gateway.decider.shadow = gateway.config
    assert len(decide(gateway)[0].backends) == 200


def test_load_is_spread_though_few_are_scored() -> None:
    gateway = a_gateway(200)
    for _ in range(600):
        _, decision = decide(gateway)
        assert decision.chosen is not None
        gateway.cluster.begin(decision.chosen, a_request(), 1000)
    counts = [gateway.cluster.flights(name) for name in gateway.cluster.names()]
    assert (min(counts), max(counts)) == (3, 3)
    for flight in list(gateway.cluster.on_the_way):
        gateway.cluster.end(flight)
    gateway.cluster.check()


async def test_a_backend_that_joins_is_a_candidate_and_one_that_left_is_not() -> None:
    gateway = a_gateway(100)
    cluster = gateway.cluster
    async with cluster:
        await cluster.add(Reporting("new", "own"), is_cold=False)
        await cluster.probe("new")
        assert decide(gateway, held={"new": 1000})[1].chosen == "new"
        await cluster.remove("new", within_s=0.0)
        assert decide(gateway, held={"new": 1000})[1].chosen not in (None, "new")
        cluster.check()


def test_an_explanation_says_how_many_were_not_considered() -> None:
    gateway = a_gateway(200)
    request = a_request()
    view, decision = decide(gateway)
    tenant = gateway.config.anonymous
    assert tenant is not None
    facts = Facts(tenant, request.model, request.prompt_tokens, request.max_new_tokens, request.prompt_tokens)
    ruling = Ruling(gateway.config.classes["chat"], None, "default", 1)
    explained = explain(request, facts, ruling, config=gateway.config, view=view, decision=decision)
    assert explained.left_out == 200 - len(explained.candidates) > 0
