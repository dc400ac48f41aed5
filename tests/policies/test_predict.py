"""The predicted time of a request at a backend, its class's targets, and the marginal cost: each part in seconds, and
the choices that follow from them.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from policies.compose import best
from policies.learning.cost import Latency
from policies.nouns import BackendView, Decision, Request, Sampling, ServiceClass
from policies.predict import (
    FIRST,
    answer_s,
    cost_of,
    cost_s,
    fastest_decode_s,
    fastest_prefill_s,
    marginal_cost,
    place_s,
    predicted_ttft_s,
    promised_ttft_s,
    uncached_tokens,
    whole_s,
)
from tests.policies.builders import a_backend, a_cluster, a_request

SPEED = Latency(fixed_s=0.1, token_s=1e-3, pair_s=1e-6, step_s=0.01, sequence_s=0.002, context_s=1e-6)
SLOW = Latency(fixed_s=0.1, token_s=1e-3, pair_s=0.0, step_s=0.1, sequence_s=0.0, context_s=0.0)
FAST = Latency(fixed_s=0.1, token_s=1e-4, pair_s=0.0, step_s=0.01, sequence_s=0.0, context_s=0.0)
VIEW = a_cluster(a_backend("slow", latency=SLOW), a_backend("fast", latency=FAST), a_backend("ill", latency=FAST))
REQUEST = a_request(prompt_tokens=1000)
ROOMLESS = Decision(None, "default", dropped=(("slow", "has_room"), ("fast", "under_limit"), ("ill", "healthy")))


def test_a_backend_that_holds_the_whole_prompt_still_computes_its_last_token() -> None:
    assert uncached_tokens(a_request(prompt_tokens=64), a_backend(held_tokens=64)) == 1


def test_unknown_cache_contents_count_as_nothing() -> None:
    assert uncached_tokens(a_request(prompt_tokens=64), a_backend(held_tokens=None)) == 64


def test_the_first_token_comes_after_the_queue_and_the_prefill_of_what_is_not_held() -> None:
    backend = a_backend(latency=SPEED, queue_s=2.0, held_tokens=600)
    expected_s = 2.0 + 0.1 + 400 * 1e-3 + 400 * (600 + 200) * 1e-6
    assert predicted_ttft_s(a_request(prompt_tokens=1000), backend) == pytest.approx(expected_s)


@pytest.mark.parametrize("held", [999, 1000, 5000])
def test_a_prompt_that_is_held_whole_takes_the_prefill_of_one_token(held: int) -> None:
    backend = a_backend(latency=SPEED, queue_s=2.0, held_tokens=held)
    expected_s = 2.0 + SPEED.prefill_s(1, 999)
    assert predicted_ttft_s(a_request(prompt_tokens=1000), backend) == pytest.approx(expected_s, rel=1e-9)


def test_the_same_tokens_take_longer_behind_a_long_context() -> None:
    short = predicted_ttft_s(a_request(prompt_tokens=1000), a_backend(latency=SPEED))
    long = predicted_ttft_s(a_request(prompt_tokens=101_000), a_backend(latency=SPEED, held_tokens=100_000))
    assert long > 50 * short


def test_the_first_token_is_due_by_the_target_and_before_the_deadline_less_the_rest_of_the_answer() -> None:
    assert promised_ttft_s(ServiceClass("any", 0)) is None
    assert promised_ttft_s(ServiceClass("chat", 0, ttft_s=0.8), decode_s=5.0) == 0.8
    assert promised_ttft_s(ServiceClass("batch", 0, deadline_s=60.0), decode_s=5.0) == 55.0
    assert promised_ttft_s(ServiceClass("both", 0, ttft_s=0.8, deadline_s=5.5), decode_s=5.0) == pytest.approx(0.5)
    assert promised_ttft_s(ServiceClass("late", 0, deadline_s=1.0), decode_s=5.0) == 0.0


def test_the_fastest_of_those_counts() -> None:
    assert fastest_prefill_s(REQUEST, VIEW, ROOMLESS) == pytest.approx(0.2)
    assert fastest_decode_s(REQUEST, VIEW, ROOMLESS, new_tokens=50) == pytest.approx(0.5)
    assert cost_s(REQUEST, VIEW, ROOMLESS, new_tokens=50) == pytest.approx(0.2 + 0.5)


def test_without_a_backend_nothing_is_predicted_or_charged() -> None:
    none = Decision(None, "default", dropped=tuple((backend.name, "fits_context") for backend in VIEW.backends))
    assert fastest_prefill_s(REQUEST, VIEW, none) == 0.0
    assert cost_s(REQUEST, VIEW, none, new_tokens=50) == 0.0


def test_what_was_cached_costs_no_prefill_and_company_shares_the_steps() -> None:
    holding = a_backend("fast", latency=FAST, held_tokens=900, running=4)
    assert answer_s(REQUEST, holding, new_tokens=100) == pytest.approx(0.1 + 0.01 + 100 * 0.01 / 4)
    assert answer_s(REQUEST, holding, new_tokens=100, uncached=1000) == pytest.approx(0.1 + 0.1 + 100 * 0.01 / 4)


def test_each_of_several_answers_costs_its_decoding_and_all_are_drawn_side_by_side() -> None:
    several = a_request(prompt_tokens=1000, sampling=Sampling(choices=4))
    one_s, four_s = (cost_s(asked, VIEW, ROOMLESS, new_tokens=50) for asked in (REQUEST, several))
    assert four_s - one_s == pytest.approx(3 * 50 * 0.01)
    assert fastest_decode_s(several, VIEW, ROOMLESS, new_tokens=50) == pytest.approx(0.5)


def test_a_place_comes_free_as_often_as_one_of_its_requests_ends() -> None:
    request = a_request(prompt_tokens=1000)
    assert place_s(request, a_backend(running=3, max_requests=4), 8.0) == 0.0
    assert place_s(request, a_backend(running=4, max_requests=4), 8.0) == 2.0
    assert place_s(request, a_backend(running=4, max_requests=4, awaited=3), 8.0) == 8.0
    assert place_s(request, a_backend(running=3, max_requests=4, awaited=1), 8.0) == 2.0
    assert place_s(request, a_backend(running=4, max_requests=4, reclaimable_requests=1), 8.0) == 0.0
    assert place_s(request, a_backend(running=400), 8.0) == 0.0, "without a limit there is always a place"


def test_room_in_the_kv_comes_free_with_the_requests_that_use_it() -> None:
    request, pool = a_request(prompt_tokens=1000), {"cache_tokens": 5000, "running": 2}
    assert place_s(request, a_backend(free_tokens=1000, **pool), 8.0) == 0.0
    assert place_s(request, a_backend(free_tokens=500, **pool), 9.0) == 1.0
    assert place_s(request, a_backend(free_tokens=500, reclaimable_tokens=500, **pool), 9.0) == 0.0
    assert place_s(request, a_backend(free_tokens=500, held_tokens=900, **pool), 9.0) == 0.0
    assert place_s(request, a_backend(free_tokens=500, awaited=1, **pool), 9.0) == 3.0
    assert place_s(request, a_backend(free_tokens=500, cache_tokens=5000), 9.0) == 0.0, "it is idle"


def test_an_answer_lasts_from_its_prefill_to_its_last_expected_token() -> None:
    request = a_request(prompt_tokens=1000, expected_new_tokens=10)
    backend = a_backend(latency=FAST, held_tokens=500, running=3)
    assert whole_s(request, backend) == pytest.approx(0.1 + 500 * 1e-4 + 10 * 0.01)


LINEAR = Latency(fixed_s=0.1, token_s=1e-3, pair_s=0.0, step_s=0.02, sequence_s=1e-3, context_s=0.0)
ASKED = a_request(prompt_tokens=1000, expected_new_tokens=100)
IDLE = {"latency": LINEAR}


def cheapest(request: Request, *backends: BackendView) -> str:
    column = marginal_cost()(request, backends)
    return max(zip([value or 0.0 for value in column], backends, strict=True), key=lambda pair: pair[0])[1].name


def test_an_idle_backend_costs_only_the_request_itself() -> None:
    cost = cost_of(ASKED, a_backend(**IDLE))
    assert cost.parts == {
        "queue": (0.0, FIRST),
        "fetch": (0.0, FIRST),
        "prefill": (pytest.approx(1.1), FIRST),
        "decode": (pytest.approx(100 * 0.021), 1.0),
        "slowdown": (0.0, 1.0),
        "delay": (0.0, FIRST),
        "eviction": (0.0, FIRST),
    }
    assert cost.total == pytest.approx(FIRST * 1.1 + 100 * 0.021)


def test_a_held_prefix_saves_its_prefill() -> None:
    parts = cost_of(ASKED, a_backend(held_tokens=900, **IDLE))
    assert parts.prefill == pytest.approx(0.2)
    # one token is computed even if all are held, and all are if it is unknown what is
    assert cost_of(ASKED, a_backend(held_tokens=5000, **IDLE)).prefill == pytest.approx(0.101)
    assert cost_of(ASKED, a_backend(held_tokens=None, **IDLE)).prefill == pytest.approx(1.1)


def test_a_prefill_costs_what_its_tokens_attend_to_as_predicted() -> None:
    backend = a_backend(latency=SPEED, held_tokens=600)
    assert cost_of(REQUEST, backend).prefill == pytest.approx(SPEED.prefill_s(400, 600))
    decision = Decision(None, "default", dropped=((backend.name, "has_room"),))
    assert fastest_prefill_s(REQUEST, a_cluster(backend), decision) == pytest.approx(SPEED.prefill_s(400, 600))


def test_requests_that_run_wait_for_its_prefill_or_decode_slower_beside_it() -> None:
    long_prompt = cost_of(ASKED, a_backend(running=4, **IDLE))
    assert long_prompt.slowdown == pytest.approx(4 * 1.0)
    assert long_prompt.decode == pytest.approx(100 * 0.025)
    long_answer = cost_of(a_request(prompt_tokens=10, expected_new_tokens=100), a_backend(running=4, **IDLE))
    assert long_answer.slowdown == pytest.approx(4 * 100 * 1e-3)
    choices = a_request(prompt_tokens=10, expected_new_tokens=100, sampling=Sampling(choices=3))
    assert cost_of(choices, a_backend(running=4, **IDLE)).slowdown == pytest.approx(3 * 4 * 100 * 1e-3)


def test_requests_that_wait_are_delayed_by_its_prefill() -> None:
    assert cost_of(ASKED, a_backend(waiting=2, **IDLE)).delay == pytest.approx(2 * 1.0)


def test_it_waits_for_the_prompts_in_front_of_it_and_for_a_place() -> None:
    assert cost_of(ASKED, a_backend(queue_s=2.0, **IDLE)).queue == pytest.approx(2.0)
    full = cost_of(ASKED, a_backend(running=4, waiting=1, max_requests=4, **IDLE))
    # two of four places have to become free, each of which is taken for 1.1 s and 100 steps of 26 ms
    assert full.queue == pytest.approx(2 * (1.1 + 2.6) / 4)
    learnt = cost_of(ASKED, a_backend(running=4, waiting=1, adaptive_limit=4, **IDLE))
    assert learnt.queue == full.queue
    assert cost_of(ASKED, a_backend(running=3, max_requests=4, **IDLE)).queue == 0.0


def test_a_prompt_evicts_most_where_most_was_computed_lately() -> None:
    calm, churned = (a_backend(cache_tokens=100_000, fresh_tokens=fresh, **IDLE) for fresh in (9000.0, 90_000.0))
    assert cost_of(ASKED, calm).eviction == pytest.approx(0.25)
    assert cost_of(ASKED, churned).eviction == pytest.approx(1.0)
    assert cost_of(ASKED, a_backend(fresh_tokens=9000.0, **IDLE)).eviction == 0.0


def test_parts_count_as_much_as_their_class_weighs() -> None:
    heavy = ServiceClass("chat", 0, weight=4.0)
    usual, weighed = (
        cost_of(a_request(prompt_tokens=1000, expected_new_tokens=100, promised=promised), a_backend(**there))
        for promised, there in ((None, {"running": 2, **IDLE}), (heavy, {"running": 2, "mean_weight": 3.0, **IDLE}))
    )
    assert (usual.first, usual.rest, usual.others) == (FIRST, 1.0, 1.0)
    assert (weighed.first, weighed.rest, weighed.others) == (4 * FIRST, 4.0, 3.0)
    assert weighed[:6] == usual[:6], "the seconds are the same"


def test_a_part_counts_up_to_twice_as_much_near_its_target() -> None:
    def weights(queue_s: float) -> tuple[float, float]:
        promised = ServiceClass("chat", 0, ttft_s=2.2, tpot_s=0.084)
        request = a_request(prompt_tokens=1000, expected_new_tokens=100, promised=promised)
        found = cost_of(request, a_backend(queue_s=queue_s, **IDLE))
        return found.first / FIRST, found.rest

    assert weights(0.0) == pytest.approx((1.5, 1.25))
    assert weights(50.0) == pytest.approx((2.0, 1.25))


def test_before_a_deadline_all_seconds_are_alike() -> None:
    promised = ServiceClass("batch", 2, deadline_s=6.4)
    cost = cost_of(a_request(prompt_tokens=1000, expected_new_tokens=100, promised=promised), a_backend(**IDLE))
    assert cost.first == cost.rest == pytest.approx(1.5)


def test_without_an_expected_answer_the_longest_one_counts() -> None:
    assert cost_of(a_request(max_new_tokens=300), a_backend(**IDLE)).decode == pytest.approx(300 * 0.021)


def test_an_idle_backend_is_preferred_to_a_crowded_one_that_holds_little() -> None:
    crowded = a_backend("crowded", running=20, held_tokens=500, **IDLE)
    assert cheapest(ASKED, crowded, a_backend("idle", **IDLE)) == "idle"
    assert (
        cheapest(ASKED, a_backend("holder", running=2, held_tokens=950, **IDLE), a_backend("idle", **IDLE)) == "holder"
    )


def test_a_prompt_waits_at_its_holder_only_as_long_as_that_pays() -> None:
    idle = a_backend("idle", **IDLE)
    assert cheapest(ASKED, a_backend("holder", queue_s=0.5, held_tokens=1000, **IDLE), idle) == "holder"
    assert cheapest(ASKED, a_backend("holder", queue_s=5.0, held_tokens=1000, **IDLE), idle) == "idle"


def test_a_backend_with_nothing_but_response_times_can_be_the_cheapest() -> None:
    hosted = a_backend("hosted", kind="openai", held_tokens=None, reported_s_ago=None, latency=Latency(token_s=1e-6))
    assert cheapest(ASKED, a_backend("own", running=8, **IDLE), hosted) == "hosted"


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 10**6), st.floats(0, 1e4)),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 10**6),
)
def test_the_cheapest_has_one_and_all_others_less(loads: list[tuple[int, int, int, float]], prompt_tokens: int) -> None:
    backends = [
        a_backend(str(at), running=running, waiting=waiting, held_tokens=held, queue_s=queue_s, max_requests=64)
        for at, (running, waiting, held, queue_s) in enumerate(loads)
    ]
    request = a_request(prompt_tokens=prompt_tokens)
    column = [value or 0.0 for value in marginal_cost()(request, backends)]
    assert max(column) == 1.0
    assert all(0.0 < value <= 1.0 for value in column)
    assert all(part >= 0.0 for backend in backends for part in cost_of(request, backend))


def test_alike_backends_share_requests_though_their_predictions_differ_a_little() -> None:
    slower, slow = replace(LINEAR, step_s=0.025), replace(LINEAR, step_s=0.06)

    def column(latency: Latency, **both: int) -> list[float | None]:
        return list(marginal_cost()(ASKED, (a_backend("a", **IDLE, **both), a_backend("b", latency=latency, **both))))

    assert column(slower) == [1.0, 1.0], "while both are idle"
    assert column(replace(LINEAR, step_s=0.0202), running=2) == [1.0, 1.0]
    for others in (column(slower, running=2), column(slow)):
        assert others[0] == 1.0
        assert (others[1] or 0.0) < 0.99


def test_an_idle_backend_that_has_to_load_an_adapter_first_is_not_alike() -> None:
    ready, loading = a_backend("a", **IDLE), a_backend("b", queue_s=0.2, **IDLE)
    assert (marginal_cost()(ASKED, (ready, loading))[1] or 0.0) < 1.0


def test_a_little_prefix_still_counts_beside_a_long_answer() -> None:
    request = a_request(prompt_tokens=1000, expected_new_tokens=2000)
    cold, warm = marginal_cost()(request, (a_backend("a", **IDLE), a_backend("b", held_tokens=200, **IDLE)))
    assert (cold or 0.0) < 1.0 == warm


@pytest.mark.parametrize("order", [1, -1])
def test_of_backends_that_cost_the_same_the_one_that_holds_the_prompt_is_chosen(order: int) -> None:
    instant = replace(LINEAR, token_s=0.0)
    both = (a_backend("cold", latency=instant), a_backend("warm", latency=instant, held_tokens=900))[::order]
    assert cost_of(ASKED, both[0]).total == cost_of(ASKED, both[1]).total
    scored = [(backend.name, value or 0.0) for backend, value in zip(both, marginal_cost()(ASKED, both), strict=True)]
    assert {best()(scored, random.Random(seed)) for seed in range(20)} == {"warm"}


def test_a_pace_that_is_not_sure_does_not_count() -> None:
    doubtful = a_backend(
        "a", latency=replace(LINEAR, fixed_s=0.2, token_s=2e-3, step_s=0.06, sequence_s=3e-3), doubt=(0.5, 1 / 3)
    )
    assert cost_of(ASKED, doubtful) == pytest.approx(cost_of(ASKED, a_backend(**IDLE)))
