"""How many backends a log needed: loads, capacities, and what it cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InvalidRequest
from router.operate.diagnose.logged import LogContents, LoggedRequest
from router.operate.plan.nouns import Plan
from router.operate.plan.plan import plan_of
from tests.router.operate.diagnose.scene import a_request, a_visit


def an_answer(at_s: float, backend: str = "own-0", *, ttft_s: float = 0.5, tpot_s: float = 0.05) -> LoggedRequest:
    """An answer of 101 tokens to a prompt of 100, with targets of a second and of 100 ms."""
    first_s, last_s = at_s + ttft_s, at_s + ttft_s + 100 * tpot_s
    visit = a_visit(at_s, backend, first_s=first_s, last_s=last_s)
    answer = a_request(at_s, visits=[visit], new_tokens=101, ended_s=last_s, ttft_target_s=1.0, tpot_target_s=0.1)
    return replace(answer, id=f"{backend}/{at_s}")


def refused(at_s: float, pools: tuple[str, ...] | None = None) -> LoggedRequest:
    return a_request(at_s, ttft_target_s=1.0, tpot_target_s=0.1, pools=pools)


def planned(requests: Iterable[LoggedRequest], *, skipped: int = 0, left_out: int = 0) -> Plan:
    return plan_of(LogContents(sorted(requests, key=lambda request: request.at_s), skipped, left_out))


def crowd(count: int, start_s: float, backend: str, *, tpot_s: float) -> list[LoggedRequest]:
    """`count` answers at once, ten times, one crowd after the other."""
    return [an_answer(start_s + 20 * turn, backend, tpot_s=tpot_s) for turn in range(10) for _ in range(count)]


def test_a_loaded_backend_shows_its_capacity_and_the_load_is_divided_by_it() -> None:
    # four at once meet 100 ms, eight do not: own-0 alone would need another
    requests = crowd(4, 0, "own-0", tpot_s=0.08) + crowd(8, 300, "own-0", tpot_s=0.15)
    (pool,) = planned(requests).pools
    assert pool.capacities[0].amount == pytest.approx(4)
    assert (pool.pool, pool.needed, pool.bound, pool.peak.limited_by) == ("own", 2, "estimate", "requests")
    assert pool.reasons[0] == "8 requests in flight at P95, TPOT of chat is met up to 4.0 a backend"
    assert pool.peak.missed / pool.peak.with_target == pytest.approx(80 / 120)


def test_backends_that_were_never_too_busy_give_an_upper_bound() -> None:
    requests = [answer for number in range(4) for answer in crowd(2, 0, f"own-{number}", tpot_s=0.05)]
    (pool,) = planned(requests).pools
    assert (pool.needed, pool.bound, pool.peak.backends) == (4, "or_fewer", 4)


def test_an_hour_in_which_a_class_missed_its_targets_needs_more_than_it_had() -> None:
    # ten of a hundred coincide for a moment, which the P95 over time does not show
    requests = [an_answer(30.0 * number) for number in range(90)] + [an_answer(2700, ttft_s=3.0) for _ in range(10)]
    (pool,) = planned(requests).pools
    assert (pool.needed, pool.bound, pool.peak.short) == (2, "at_least", ("chat",))
    assert any("1 did not suffice" in reason for reason in pool.reasons)


def test_a_class_that_is_too_slow_alone_gives_no_number() -> None:
    (pool,) = planned(an_answer(30.0 * number, tpot_s=0.2) for number in range(40)).pools
    assert pool.needed is None
    assert any("was missed at every load" in reason for reason in pool.reasons)


def test_requests_that_reached_no_backend_are_demand_of_a_pool_that_they_may_use() -> None:
    served = crowd(4, 0, "own-0", tpot_s=0.08) + crowd(8, 300, "own-0", tpot_s=0.15)
    turned_away = [refused(300 + 20 * turn, ("own", "gone")) for turn in range(10) for _ in range(12)]
    plan = planned([*served, *turned_away, refused(1, ("gone",))], skipped=2, left_out=3)
    (pool,) = plan.pools
    assert (pool.needed, pool.peak.unserved) == (5, 120)
    notes = "\n".join(plan.notes)
    for note in ("120 requests reached no backend", "without an answer in this log: 1", "2 lines could", "3 in all"):
        assert note in notes


def test_each_hour_and_pool_has_a_row_and_silent_hours_are_counted() -> None:
    plan = planned([an_answer(10.0, "own-0"), an_answer(3 * 3600 + 10.0, "rented@gpu:1"), an_answer(30.0, "own-1")])
    assert {pool.pool: [hour.start_s for hour in pool.hours] for pool in plan.pools} == {"own": [0], "rented": [10800]}
    assert "2 hours in between have no request" in "\n".join(plan.notes)
    assert all(hour.needed == 1 for pool in plan.pools for hour in pool.hours)


def test_a_log_that_never_reached_a_backend_is_an_error_with_a_hint() -> None:
    with pytest.raises(InvalidRequest, match=r"reached a backend.*backends up"):
        planned([refused(1.0)])


def test_a_log_without_targets_is_an_error_with_a_hint() -> None:
    with pytest.raises(InvalidRequest, match=r"ttft_target_s or tpot_target_s.*ttft_p95"):
        planned([a_request(1.0, visits=[a_visit(1.0, "own-0")])])


ANSWERS = st.builds(
    an_answer,
    st.integers(0, 9000).map(float),
    st.sampled_from(["own-0", "own-1", "far@host-a:1"]),
    ttft_s=st.sampled_from([0.2, 0.9, 3.0]),
    tpot_s=st.sampled_from([0.02, 0.09, 0.3]),
)


@given(st.lists(ANSWERS, min_size=1, max_size=60), st.lists(st.integers(0, 9000).map(float).map(refused), max_size=10))
def test_every_request_is_in_one_hour_of_one_pool_and_numbers_fit(
    answers: list[LoggedRequest], unserved: list[LoggedRequest]
) -> None:
    plan = planned([*answers, *unserved])
    hours = [hour for pool in plan.pools for hour in pool.hours]
    assert sum(hour.requests for hour in hours) == len(answers) + len(unserved)
    assert sum(hour.unserved for hour in hours) == len(unserved)
    for pool in plan.pools:
        assert pool.needed == pool.peak.needed
        for hour in pool.hours:
            assert hour.p95_requests <= hour.most_requests <= hour.requests + len(answers) + len(unserved)
            assert hour.needed is None or 1 <= hour.needed <= (pool.needed or math.inf)
