"""Sums, means, quantiles and samples that follow the last observations."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.fading import AnswerLengths, FadingSum, ObservationSample, SlowTime, Turnover, p99_factor


def test_turnover_is_one_when_every_cache_was_computed_once() -> None:
    turnover = Turnover()
    for _ in range(4):
        turnover.computed(5_000, cache_tokens=20_000, caches=2)
        turnover.computed(10_000, cache_tokens=40_000, caches=2)
    assert turnover.at == pytest.approx(1.0)


def test_a_cache_of_unknown_size_is_taken_to_be_large() -> None:
    turnover = Turnover()
    turnover.computed(1_000, cache_tokens=None, caches=1)
    assert 0.0 < turnover.at < 0.01


def test_what_was_added_counts_half_after_its_half_life() -> None:
    fading = FadingSum(half_life=300.0)
    fading.add(1000, now=50.0)
    assert fading.at(50.0) == 1000
    assert fading.at(350.0) == pytest.approx(500)
    fading.add(100, now=350.0)
    assert fading.at(950.0) == pytest.approx(150)


def test_a_clock_that_goes_back_makes_nothing_larger() -> None:
    fading = FadingSum(half_life=300.0)
    fading.add(1000, now=500.0)
    assert fading.at(100.0) == 1000
    fading.add(1, now=100.0)
    assert fading.at(500.0) == 1001


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5))))
def test_a_fading_sum_is_never_negative_and_never_more_than_the_whole_sum(
    added: list[tuple[float, float]],
) -> None:
    fading, now = FadingSum(half_life=300.0), 0.0
    for amount, pause_s in added:
        now += pause_s
        fading.add(amount, now)
        assert 0.0 <= fading.at(now) <= sum(each for each, _ in added) * (1 + 1e-9)


def test_before_any_answer_a_guess_stands_in_that_keeps_to_the_limit() -> None:
    lengths = AnswerLengths()
    assert lengths.expected("acme", "chat", most=10_000) == 256
    assert lengths.expected("acme", "chat", most=16) == 16


def test_each_tenant_and_class_has_its_own_mean() -> None:
    lengths = AnswerLengths()
    for _ in range(200):
        lengths.learn("acme", "chat", 40)
        lengths.learn("acme", "batch", 2000)
    assert lengths.expected("acme", "chat", most=10_000) == pytest.approx(40, abs=1)
    assert lengths.expected("acme", "batch", most=10_000) == pytest.approx(2000, abs=5)
    assert lengths.expected("labs", "chat", most=10_000) == 256


def test_answers_that_were_empty_still_count_as_a_token() -> None:
    lengths = AnswerLengths()
    lengths.learn("acme", "chat", 0)
    assert lengths.expected("acme", "chat", most=100) == 1


def test_quantiles_are_unknown_after_too_few_values() -> None:
    slow = SlowTime()
    for _ in range(7):
        slow.observe(1.0)
        assert slow.p99 is None
    slow.observe(1.0)
    assert slow.p99 == pytest.approx(1.0)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_the_p99_is_above_nearly_all_values_and_not_far_above(spread: float) -> None:
    rng, slow, above, estimates = random.Random(1), SlowTime(), 0, []
    for number in range(2000):
        value = 0.2 * math.exp(rng.gauss(0, spread))
        if number >= 100:
            assert slow.p99 is not None
            above += value > slow.p99
            estimates.append(slow.p99)
        slow.observe(value)
    assert above / 1900 < 0.05
    exact = 0.2 * p99_factor(spread**2)
    assert exact / 2 < sorted(estimates)[950] < exact * 2


def test_the_p99_follows_a_backend_that_becomes_slower() -> None:
    slow = SlowTime()
    for _ in range(200):
        slow.observe(0.1)
    for _ in range(60):
        slow.observe(10.0)
    assert slow.p99 is not None
    assert slow.p99 > 9.0


@pytest.mark.parametrize(("share", "deviations"), [(0.5, 0.0), (0.9, 1.2816), (0.95, 1.6449), (0.99, 2.3263)])
def test_each_quantile_is_that_of_a_log_normal_quantity(share: float, deviations: float) -> None:
    rng, slow, estimates = random.Random(2), SlowTime(), []
    for number in range(2000):
        slow.observe(0.2 * math.exp(rng.gauss(0, 0.5)))
        if number >= 100:
            estimates.append(slow.quantile(share))
        elif number < 7:
            assert slow.quantile(share) is None
    median = sorted(filter(None, estimates))[950]
    assert median == pytest.approx(0.2 * math.exp(0.5 * deviations), rel=0.15)


def test_what_is_no_duration_is_ignored() -> None:
    slow = SlowTime()
    for value in (0.0, -1.0, math.inf, math.nan):
        for _ in range(10):
            slow.observe(value)
    assert slow.p99 is None


def test_while_few_come_all_are_taken() -> None:
    sample = ObservationSample(per_s=10.0, burst=5.0)
    assert all(sample.takes(100.0 + 0.1 * number) for number in range(100))


def test_of_many_at_once_a_burst_is_taken_and_then_a_number_a_second() -> None:
    sample = ObservationSample(per_s=10.0, burst=5.0)
    assert sum(sample.takes(100.0) for _ in range(50)) == 5
    assert sum(sample.takes(100.0 + 0.01 * number) for number in range(1, 201)) == 20


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    sample = ObservationSample(per_s=10.0, burst=2.0)
    assert sample.takes(100.0)
    assert sample.takes(50.0)
    assert not sample.takes(50.0)
    assert sample.takes(50.1)


@given(st.lists(st.floats(0.0, 5.0), max_size=200), st.floats(1.0, 50.0), st.floats(1.0, 20.0))
def test_no_period_has_more_than_the_burst_and_its_share(waits: list[float], per_s: float, burst: float) -> None:
    sample, now, taken = ObservationSample(per_s=per_s, burst=burst), 0.0, []
    for wait in waits:
        now += wait
        if sample.takes(now):
            taken.append(now)
    for first, began in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + (taken[last] - began) * per_s + 1e-6
