"""Where a prompt is computed: at the backend that answers it, or at another one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from policies.compose import Policy, best
from policies.learning.cost import Latency
from policies.nouns import BackendView, Capability, Decision, PrefillLeg, Sampling
from policies.predict import cost_of
from policies.prefill import TRANSFER_S, TRANSFER_TOKEN_S, prefill_leg, with_prefill
from policies.waiting import is_outage
from tests.policies.builders import a_backend, a_cluster, a_request

SPEED = Latency(fixed_s=0.1, token_s=1e-3, pair_s=0.0, step_s=0.02, sequence_s=1e-3, context_s=0.0)
LONG = a_request(prompt_tokens=8000, expected_new_tokens=100, may_transfer=True)
BUSY = a_backend("d", pool="answers", latency=SPEED, running=20, prefill="prompts", held_tokens=0)
IDLE = replace(BUSY, running=0)
FREE = a_backend("p0", pool="prompts", latency=SPEED, held_tokens=0, unfit="only_prefills")


def leg_of(chosen: BackendView, *backends: BackendView, **request: object) -> PrefillLeg | None:
    return prefill_leg(replace(LONG, **request), chosen, (chosen, *backends))


def test_a_long_prompt_leaves_a_backend_where_it_would_stall_others() -> None:
    leg = leg_of(BUSY, FREE)
    assert leg is not None
    assert leg.backend == "p0"
    assert leg.seconds == pytest.approx(0.1 + 8.0 + TRANSFER_S + 8000 * TRANSFER_TOKEN_S + 0.1, rel=0.01)
    assert 0 < leg.saved < cost_of(LONG, BUSY).total


def test_it_stays_where_nothing_would_stall() -> None:
    assert leg_of(IDLE, FREE) is None


def test_a_short_prompt_and_a_held_one_stay() -> None:
    assert leg_of(BUSY, FREE, prompt_tokens=20) is None
    assert leg_of(replace(BUSY, held_tokens=7990), FREE) is None


def test_the_free_one_of_several_computes_it() -> None:
    leg = leg_of(BUSY, replace(FREE, name="p1", queue_s=5.0, waiting=1), FREE)
    assert leg is not None
    assert leg.backend == "p0"


def test_it_stays_where_all_others_have_too_much_to_do() -> None:
    assert leg_of(BUSY, replace(FREE, queue_s=1000.0)) is None


@pytest.mark.parametrize(
    "why",
    [
        {"healthy": False},
        {"draining": True},
        {"may_take": 0},
        {"models": frozenset({"other"})},
        {"pool": "others"},
        {"context_tokens": 4000},
    ],
    ids=lambda why: next(iter(why)),
)
def test_a_backend_that_cannot_compute_it_is_not_asked(why: dict[str, object]) -> None:
    assert leg_of(BUSY, replace(FREE, **why)) is None


@pytest.mark.parametrize(
    "why",
    [
        {"may_transfer": False},
        {"sampling": Sampling(choices=2)},
        {"needs": frozenset({Capability.MEDIA})},
        {"needs": frozenset({Capability.CONTINUES_TEXT})},
    ],
    ids=str,
)
def test_some_prompts_are_computed_where_they_are_answered(why: dict[str, object]) -> None:
    assert leg_of(BUSY, FREE, **why) is None


def test_without_another_pool_there_is_no_leg() -> None:
    assert leg_of(replace(BUSY, prefill=None), FREE) is None


def test_the_decision_says_so_and_predicts_the_first_token_with_both_legs() -> None:
    view = a_cluster(BUSY, FREE)
    decision = with_prefill(LONG, view, Decision("d", "default", predicted_ttft_s=8.1))
    assert decision.prefill is not None
    assert decision.predicted_ttft_s == decision.prefill.seconds
    refused = Decision(None, "default")
    assert with_prefill(LONG, view, refused) is refused


@given(running=st.integers(0, 100), tokens=st.integers(1, 100_000), held=st.integers(0, 100_000))
def test_a_leg_always_saves_what_it_says(running: int, tokens: int, held: int) -> None:
    chosen = replace(BUSY, running=running, held_tokens=min(held, tokens))
    leg = leg_of(chosen, FREE, prompt_tokens=tokens)
    if leg is not None:
        assert 0 < leg.saved <= cost_of(replace(LONG, prompt_tokens=tokens), chosen).total


ALONE_NEVER = replace(IDLE, needs_prefill=True)


def test_a_backend_that_computes_no_prompts_always_has_the_leg() -> None:
    for request in ({}, {"prompt_tokens": 20}, {"may_transfer": False}):
        assert leg_of(IDLE, FREE, **request) is None
        leg = leg_of(ALONE_NEVER, FREE, **request)
        assert leg is not None
        assert leg.backend == "p0"


def test_a_backend_to_avoid_computes_no_prompt() -> None:
    view = a_cluster(ALONE_NEVER, FREE, replace(FREE, name="p1", queue_s=5.0, waiting=1))
    decision = with_prefill(LONG, view, Decision("d", "p"), avoiding={"p0"})
    assert decision.prefill is not None
    assert decision.prefill.backend == "p1"


@pytest.mark.parametrize(
    ("changes", "request_", "reason"),
    [
        ({}, {}, None),
        ({"prefill": None}, {}, "needs_prefill"),
        ({}, {"sampling": Sampling(choices=2)}, "needs_prefill"),
        ({"prefill": "elsewhere"}, {}, "no_prefill"),
        # a permanent objection is reported before a passing one
        ({"prefill": None, "healthy": False}, {}, "needs_prefill"),
    ],
)
def test_a_backend_that_computes_no_prompts_gets_what_another_one_computes_for_it(
    changes: dict[str, Any], request_: dict[str, Any], reason: str | None
) -> None:
    policy = Policy("p", (("healthy", lambda _, backend: backend.healthy),), (), best())
    decision = policy.decide(replace(LONG, **request_), a_cluster(replace(ALONE_NEVER, **changes), FREE), Random(1))
    assert dict(decision.dropped).get("d") == reason
    assert decision.chosen == (None if reason else "d")
    assert is_outage(decision) == (reason == "no_prefill")


def test_a_partner_that_is_ill_or_avoided_is_none() -> None:
    policy, ill = Policy("p", (), (), best()), replace(FREE, healthy=False)
    for view, avoiding in ((a_cluster(ALONE_NEVER, ill), ()), (a_cluster(ALONE_NEVER, FREE), ("p0",))):
        decision = policy.decide(LONG, view, Random(1), avoiding=avoiding)
        assert (decision.chosen, dict(decision.dropped)["d"]) == (None, "no_prefill")
