"""The predicted time of a request at a backend, and its class's targets."""

import pytest

from policies.learning.cost import Latency
from policies.nouns import Decision, Sampling, ServiceClass
from policies.predict import (
    answer_s,
    cost_s,
    fastest_decode_s,
    fastest_prefill_s,
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
