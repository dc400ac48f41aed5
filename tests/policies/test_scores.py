from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import scores
from policies.compose import Score
from policies.learning.cost import Latency
from policies.nouns import BackendView
from policies.predict import marginal_cost
from tests.policies.builders import a_backend, a_request

SPEED = Latency(fixed_s=0.0, token_s=1e-3, pair_s=0.0)
ALL = [
    scores.cache_overlap(),
    scores.cache_thrift(),
    scores.expected_ttft(),
    scores.balance(),
    scores.turn(),
    scores.session(),
    marginal_cost(),
]


def best(score: Score, request_id: str = "r1", session: str | None = None, *backends: BackendView) -> str:
    column = score(a_request(id=request_id, session=session), backends)
    return max(zip([value or 0.0 for value in column], backends, strict=True), key=lambda pair: pair[0])[1].name


def test_overlap_is_the_share_of_the_prompt_that_is_held() -> None:
    backends = [a_backend(held_tokens=held) for held in (0, 250, 1000, 5000)]
    assert scores.cache_overlap()(a_request(prompt_tokens=1000), backends) == [0.0, 0.25, 1.0, 1.0]
    assert scores.cache_overlap()(a_request(), [a_backend(held_tokens=None)]) == [None]


def test_overlap_of_an_empty_prompt_is_none_at_all() -> None:
    assert scores.cache_overlap()(a_request(prompt_tokens=0), [a_backend(held_tokens=0)]) == [0.0]


def test_the_backend_that_holds_the_prompt_is_expected_to_answer_first() -> None:
    cold, warm = a_backend(latency=SPEED), a_backend(latency=SPEED, held_tokens=900)
    slow, fast = scores.expected_ttft()(a_request(prompt_tokens=1000), [cold, warm])
    assert fast == 1.0
    assert slow == pytest.approx((0.1 + scores.NOTICEABLE_S) / (1.0 + scores.NOTICEABLE_S))


def test_a_long_queue_outweighs_a_warm_cache() -> None:
    warm = a_backend(latency=SPEED, held_tokens=1000, queue_s=5.0)
    cold = a_backend(latency=SPEED, held_tokens=0)
    assert scores.expected_ttft()(a_request(prompt_tokens=1000), [warm, cold])[1] == 1.0


def test_a_fast_backend_that_holds_nothing_beats_a_slow_one_that_holds_half() -> None:
    slow, fast = a_backend("slow", latency=SPEED, held_tokens=500), a_backend("fast", latency=Latency(0, 1e-4, 0))
    assert best(scores.expected_ttft(), "r1", None, slow, fast) == "fast"


def test_thrift_keeps_a_prompt_where_it_is_held() -> None:
    cold, warm = a_backend("cold", latency=SPEED), a_backend("warm", latency=SPEED, held_tokens=900)
    lost, kept = scores.cache_thrift()(a_request(prompt_tokens=1000), [cold, warm])
    assert (lost, kept) == (pytest.approx(0.0), pytest.approx(0.9))


def test_thrift_gives_new_prompts_to_the_cache_that_turns_over_more_slowly() -> None:
    score = scores.cache_thrift()
    busy, calm = a_backend(latency=SPEED, fresh_tokens=9000.0), a_backend(latency=SPEED, fresh_tokens=4000.0)
    assert score(a_request(prompt_tokens=1000), [busy, calm]) == [pytest.approx(0.0), pytest.approx(0.25)]
    # a cache of four times the size keeps a prompt longer, although more is computed there
    large = a_backend(latency=SPEED, fresh_tokens=9000.0, cache_tokens=80_000)
    small = a_backend(latency=SPEED, fresh_tokens=4000.0, cache_tokens=20_000)
    assert score(a_request(prompt_tokens=1000), [large, small]) == [pytest.approx(0.25), pytest.approx(0.0)]


def test_thrift_counts_caches_as_equal_where_not_all_sizes_are_known() -> None:
    reporting = a_backend(latency=SPEED, fresh_tokens=5000.0, cache_tokens=1_000_000)
    silent = a_backend(latency=SPEED, fresh_tokens=3000.0)
    more, less = scores.cache_thrift()(a_request(prompt_tokens=1000), [reporting, silent])
    assert more is not None
    assert less is not None
    assert less > more


def test_thrift_moves_a_held_prompt_once_the_queue_there_costs_more_than_it_saves() -> None:
    score, request = scores.cache_thrift(), a_request(prompt_tokens=1000)

    def prefers_warm(queue_s: float) -> bool:
        warm = a_backend(latency=SPEED, held_tokens=1000, queue_s=queue_s)
        kept, moved = score(request, [warm, a_backend(latency=SPEED)])
        return (kept or 0.0) > (moved or 0.0)

    # the whole prompt takes one second
    assert prefers_warm(3.9)
    assert not prefers_warm(4.1)


@given(
    st.lists(
        st.builds(
            a_backend,
            held_tokens=st.none() | st.integers(0, 5000),
            fresh_tokens=st.floats(0, 1e9),
            cache_tokens=st.none() | st.integers(0, 10**7),
            queue_s=st.floats(0, 1e6),
            weight=st.floats(0, 10),
        ),
        max_size=5,
    ),
    st.integers(0, 5000),
)
def test_thrift_is_a_share_for_any_candidates(candidates: list[BackendView], prompt_tokens: int) -> None:
    for value in scores.cache_thrift()(a_request(prompt_tokens=prompt_tokens), candidates):
        assert value is not None
        assert 0.0 <= value <= 1.0


def test_balance_is_the_unused_share_where_limits_are_known() -> None:
    backends = [a_backend(running=4, waiting=4, max_requests=16), a_backend(running=40, max_requests=16)]
    assert scores.balance()(a_request(), backends) == [0.5, 0.0]


def test_balance_compares_requests_per_weight_where_limits_are_not_known() -> None:
    backends = [a_backend(running=1), a_backend(running=3, max_requests=16), a_backend(running=7, weight=4.0)]
    assert scores.balance()(a_request(), backends) == [1.0, 0.5, 1.0]


def test_turns_are_even_in_the_long_run_and_follow_weights() -> None:
    backends = (a_backend("a"), a_backend("b"), a_backend("c", weight=2.0))
    turns = Counter(best(scores.turn(), f"r{number}", None, *backends) for number in range(4000))
    assert turns["a"] == pytest.approx(1000, rel=0.15)
    assert turns["b"] == pytest.approx(1000, rel=0.15)
    assert turns["c"] == pytest.approx(2000, rel=0.15)


def test_a_session_stays_and_a_leaving_backend_moves_only_its_own() -> None:
    backends = [a_backend(f"b{number}") for number in range(5)]
    before = {f"s{s}": best(scores.session(), f"r{s}", f"s{s}", *backends) for s in range(200)}
    again = {f"s{s}": best(scores.session(), "another", f"s{s}", *backends) for s in range(200)}
    after = {f"s{s}": best(scores.session(), f"r{s}", f"s{s}", *backends[:-1]) for s in range(200)}
    assert before == again
    assert {s for s in before if before[s] != after[s]} == {s for s in before if before[s] == "b4"}


def test_without_a_session_the_first_block_of_a_tenants_prompt_decides() -> None:
    backends = [a_backend(f"b{number}") for number in range(50)]
    session = scores.session()
    first = session(a_request(id="r1", block_keys=(7, 8)), backends)
    assert first == session(a_request(id="r2", block_keys=(7, 9)), backends)
    assert first != session(a_request(block_keys=(6, 8)), backends)
    assert first != session(a_request(block_keys=(7, 8), tenant="labs"), backends)


BACKENDS = st.lists(
    st.builds(
        a_backend,
        st.sampled_from("abcdef"),
        running=st.integers(0, 1000),
        waiting=st.integers(0, 1000),
        waiting_tokens=st.integers(0, 10**7),
        max_requests=st.none() | st.integers(1, 100),
        held_tokens=st.none() | st.integers(0, 10**6),
        queue_s=st.floats(0, 1e6),
        weight=st.floats(0.01, 100),
    ),
    min_size=1,
    max_size=5,
)


@given(BACKENDS, st.integers(0, 10**6))
def test_every_score_lies_between_nothing_and_one(backends: list[BackendView], prompt_tokens: int) -> None:
    for score in ALL:
        column = score(a_request(prompt_tokens=prompt_tokens), backends)
        assert len(column) == len(backends)
        assert all(value is None or 0.0 <= value <= 1.0 for value in column)
