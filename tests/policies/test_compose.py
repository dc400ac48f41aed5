import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.catalogue import builtin_catalogue
from policies.compose import (
    Filter,
    Policy,
    Score,
    WeightedScore,
    best,
    best_of,
    fits_context,
    has_room,
    healthy,
    serves_model,
    under_limit,
)
from policies.nouns import BackendView, Capability, Request
from tests.policies.builders import a_backend, a_cluster, a_request

NAMED = builtin_catalogue().policies


def fixed(*values: float | None) -> Score:
    return lambda request, candidates: list(values)


def a_policy(*scores: WeightedScore) -> Policy:
    return Policy("own", (("healthy", lambda request, backend: backend.healthy),), scores, best())


def rng() -> random.Random:
    return random.Random(1)


def test_the_decision_lists_dropped_backends_and_each_score() -> None:
    policy = a_policy(WeightedScore("x", 3.0, fixed(1.0, 0.0)), WeightedScore("y", 1.0, fixed(0.0, 1.0)))
    view = a_cluster(a_backend("a"), a_backend("b"), a_backend("c", healthy=False))
    decision = policy.decide(a_request(), view, rng())
    assert decision.chosen == "a"
    assert decision.policy == "own"
    assert decision.dropped == (("c", "healthy"),)
    assert decision.scores == (("a", 0.75), ("b", 0.25))
    assert decision.details == (("a", "x", 1.0), ("b", "x", 0.0), ("a", "y", 0.0), ("b", "y", 1.0))


def test_a_score_unknown_for_one_votes_for_none_and_is_still_shown() -> None:
    policy = a_policy(WeightedScore("x", 9.0, fixed(1.0, None)), WeightedScore("y", 1.0, fixed(0.0, 1.0)))
    decision = policy.decide(a_request(), a_cluster(a_backend("a"), a_backend("b")), rng())
    assert decision.chosen == "b"
    assert decision.scores == (("a", 0.0), ("b", 1.0))
    assert ("b", "x", None) in decision.details


def test_backends_outside_the_rules_pools_are_dropped_whatever_the_policy() -> None:
    view = a_cluster(a_backend("a", pool="vllm"), a_backend("b"))
    decision = a_policy().decide(a_request(pools=("own",)), view, rng())
    assert (decision.chosen, decision.dropped) == ("b", (("a", "in_pools"),))


def test_a_backend_that_failed_this_request_is_avoided() -> None:
    view = a_cluster(a_backend("a"), a_backend("b"))
    decision = a_policy().decide(a_request(), view, rng(), avoiding={"b"})
    assert (decision.chosen, decision.dropped) == ("a", (("b", "avoided"),))


def test_a_backend_that_the_request_cannot_go_to_is_dropped_with_the_views_own_reason() -> None:
    view = a_cluster(a_backend("a"), a_backend("b", unfit="no_endpoint"))
    decision = a_policy().decide(a_request(), view, rng())
    assert (decision.chosen, decision.dropped) == ("a", (("b", "no_endpoint"),))


def test_no_backend_left_is_a_decision_with_reasons() -> None:
    decision = a_policy().decide(a_request(), a_cluster(a_backend("a", healthy=False)), rng())
    assert (decision.chosen, decision.dropped, decision.scores) == (None, (("a", "healthy"),), ())


def test_an_empty_cluster_has_no_backend() -> None:
    assert a_policy().decide(a_request(), a_cluster(), rng()).chosen is None


def test_by_default_a_prompt_goes_where_its_prefix_lives() -> None:
    view = a_cluster(*(a_backend(f"b{n}", held_tokens=2000 if n == 3 else 0, running=1) for n in range(5)))
    assert NAMED["default"].decide(a_request(prompt_tokens=2048), view, rng()).chosen == "b3"


def test_by_default_equal_backends_share_the_requests() -> None:
    view, dice = a_cluster(a_backend("a"), a_backend("b")), rng()
    chosen = [NAMED["default"].decide(a_request(), view, dice).chosen for _ in range(100)]
    assert 30 < chosen.count("a") < 70


@pytest.mark.parametrize("name", NAMED)
def test_a_drained_backend_gets_no_new_request(name: str) -> None:
    view = a_cluster(a_backend("a", draining=True), a_backend("b", running=500))
    assert NAMED[name].decide(a_request(), view, rng()).chosen == "b"


@pytest.mark.parametrize("name", ["default", "least_load", "power_of_two"])
def test_a_busy_backend_is_spared(name: str) -> None:
    view = a_cluster(a_backend("a", running=50, waiting_tokens=10**6), a_backend("b"))
    assert NAMED[name].decide(a_request(), view, rng()).chosen == "b"


@given(
    name=st.sampled_from(sorted(NAMED)),
    loads=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_same_request_view_and_seed_is_the_same_decision(name: str, loads: Sequence[int], seed: int) -> None:
    view = a_cluster(*(a_backend(f"b{n}", running=load) for n, load in enumerate(loads)))

    def decide(request: Request) -> object:
        return NAMED[name].decide(request, view, random.Random(seed))

    assert decide(a_request()) == decide(a_request())


def test_deciding_leaves_the_view_as_it_is() -> None:
    backends: tuple[BackendView, ...] = (a_backend("a"), a_backend("b"))
    view = a_cluster(*backends)
    NAMED["default"].decide(a_request(), view, rng())
    assert view.backends == backends


def test_a_backend_that_cannot_do_what_the_request_needs_gets_none_of_it() -> None:
    able = a_backend("able", capabilities=frozenset({Capability.MEDIA}), running=9)
    request = a_request(needs=frozenset({Capability.MEDIA}))
    decision = NAMED["default"].decide(request, a_cluster(a_backend("unable"), able), rng())
    assert decision.chosen == "able"
    assert [name for name, _ in decision.dropped] == ["unable"]
    assert NAMED["default"].decide(request, a_cluster(a_backend("unable")), rng()).chosen is None


def test_contexts_that_an_estimated_prompt_fits_in_any_case_come_first() -> None:
    short, long = a_backend("short", context_tokens=2000), a_backend("long", context_tokens=8000, running=9)
    view = a_cluster(short, long)
    unsure = a_request(prompt_tokens=1800, least_prompt_tokens=700, likely_prompt_tokens=(1500, 2100))
    policy = builtin_catalogue().policies["default"]
    decision = policy.decide(unsure, view, random.Random(1))
    assert (decision.chosen, decision.dropped) == ("long", (("short", "may_not_fit"),))
    exact = a_request(prompt_tokens=1800)
    assert policy.decide(exact, view, random.Random(1)).dropped == ()
    alone = policy.decide(unsure, a_cluster(short), random.Random(1))
    assert alone.chosen == "short", "where none is long enough for certain, the backend decides"


def full(name: str, **known: Any) -> BackendView:
    return a_backend(name, running=4, max_requests=4, **known)


def test_a_policy_may_wait_for_a_full_backend_while_others_have_room() -> None:
    prompt = a_request(prompt_tokens=40_000, max_new_tokens=10)
    view = a_cluster(full("holder", held_tokens=40_000), a_backend("idle", max_requests=4))
    decision = NAMED["default"].decide(prompt, view, rng())
    assert (decision.chosen, decision.awaits, decision.dropped) == (None, "holder", (("holder", "under_limit"),))
    assert decision.wait_s is not None
    assert decision.wait_s > 0
    assert {name for name, _ in decision.scores} == {"holder", "idle"}
    any_room = NAMED["default"].decide(prompt, view, rng(), takes_any=True)
    assert (any_room.chosen, any_room.awaits) == ("idle", None)


def test_where_all_are_full_the_wait_is_not_its_choice() -> None:
    view = a_cluster(full("holder", held_tokens=900), full("other"))
    decision = NAMED["default"].decide(a_request(), view, rng())
    assert (decision.chosen, decision.awaits, decision.wait_s) == (None, "holder", None)
    least = NAMED["least_load"].decide(a_request(), view, rng())
    assert (least.chosen, least.awaits, least.scores) == (None, None, ())


def test_no_request_waits_for_a_full_backend_that_is_ill_whatever_the_order_of_the_filters() -> None:
    filters = (("under_limit", under_limit()), ("healthy", healthy()))
    policy = Policy("p", filters, NAMED["default"].scores, best(), waits_for_best=True)
    view = a_cluster(full("holder", held_tokens=900, healthy=False), a_backend("idle"))
    decision = policy.decide(a_request(), view, rng())
    assert (decision.chosen, decision.dropped) == ("idle", (("holder", "healthy"),))


def test_a_pick_that_is_no_candidate_is_an_error() -> None:
    policy = Policy("own", (), (WeightedScore("x", 1.0, fixed(1.0)),), lambda _, __: "elsewhere")
    with pytest.raises(LookupError, match="policy own picked elsewhere, which is no candidate"):
        policy.decide(a_request(), a_cluster(a_backend("a")), rng())


@pytest.mark.parametrize(
    ("passes", "request_", "backend", "verdict"),
    [
        (healthy(), a_request(), a_backend(), True),
        (healthy(), a_request(), a_backend(healthy=False), False),
        (healthy(), a_request(), a_backend(draining=True), False),
        (healthy(), a_request(), a_backend(reported_s_ago=11.0), False),
        (healthy(fresh=20.0), a_request(), a_backend(reported_s_ago=11.0), True),
        (healthy(), a_request(), a_backend(reported_s_ago=None), True),
        (serves_model(), a_request(model="llama"), a_backend(), True),
        (serves_model(), a_request(model="qwen"), a_backend(), False),
        (fits_context(), a_request(prompt_tokens=90, max_new_tokens=10), a_backend(context_tokens=100), True),
        (fits_context(), a_request(prompt_tokens=91, max_new_tokens=10), a_backend(context_tokens=100), False),
        (fits_context(), a_request(prompt_tokens=10**9), a_backend(context_tokens=None), True),
        (
            fits_context(),
            a_request(prompt_tokens=500, least_prompt_tokens=90, max_new_tokens=10),
            a_backend(context_tokens=100),
            True,
        ),
        (
            fits_context(),
            a_request(prompt_tokens=500, least_prompt_tokens=91, max_new_tokens=10),
            a_backend(context_tokens=100),
            False,
        ),
        (
            fits_context(),
            a_request(prompt_tokens=10**6, needs=frozenset({Capability.EMBEDDINGS})),
            a_backend(context_tokens=100),
            True,
        ),
        (has_room(), a_request(prompt_tokens=101), a_backend(free_tokens=100, running=1), False),
        (has_room(), a_request(prompt_tokens=101), a_backend(free_tokens=100, running=1, held_tokens=1), True),
        (has_room(tokens=1), a_request(prompt_tokens=100), a_backend(free_tokens=100, waiting=1), False),
        (has_room(), a_request(prompt_tokens=101), a_backend(free_tokens=100), True),
        (has_room(), a_request(prompt_tokens=101), a_backend(free_tokens=None, running=9), True),
        (under_limit(), a_request(), a_backend(running=3, waiting=1, max_requests=4), False),
        (under_limit(), a_request(), a_backend(running=2, waiting=1, max_requests=4), True),
        (under_limit(), a_request(), a_backend(running=2000, max_requests=None), True),
        (under_limit(), a_request(), a_backend(running=9, adaptive_limit=9), False),
        (under_limit(), a_request(), a_backend(running=8, adaptive_limit=9), True),
        (under_limit(), a_request(), a_backend(running=9, adaptive_limit=9, max_requests=16), True),
        (under_limit(), a_request(), a_backend(running=4, max_requests=4, reclaimable_requests=1), True),
        (
            has_room(),
            a_request(prompt_tokens=9),
            a_backend(running=1, free_tokens=5, reclaimable_tokens=4),
            True,
        ),
        (
            has_room(),
            a_request(prompt_tokens=9),
            a_backend(running=1, free_tokens=5, reclaimable_tokens=3),
            False,
        ),
    ],
)
def test_a_filter_asks_one_question(passes: Filter, request_: Request, backend: BackendView, verdict: bool) -> None:
    assert passes(request_, backend) is verdict


SCORED = [("a", 0.5), ("b", 0.9), ("c", 0.9), ("d", 0.1)]


def test_the_best_wins_and_equals_share() -> None:
    rng = random.Random(1)
    picked = Counter(best()(SCORED, rng) for _ in range(1000))
    assert set(picked) == {"b", "c"}
    assert abs(picked["b"] - 500) < 100


def test_best_of_two_never_takes_the_worst_of_many_and_takes_the_second_best_at_times() -> None:
    rng = random.Random(1)
    picked = Counter(best_of()([("a", 0.5), ("b", 0.9), ("d", 0.1)], rng) for _ in range(1000))
    assert set(picked) == {"a", "b"}
    assert picked["b"] > picked["a"] > 200


def test_a_sample_larger_than_the_field_is_the_field() -> None:
    assert best_of(sample=9)([("a", 0.5)], random.Random(1)) == "a"
