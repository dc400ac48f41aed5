"""Quantiles of a quantity, from its last values."""

from __future__ import annotations

import math
import random

import pytest

from policies.learning.slow import SlowTime, p99_factor


def test_it_is_unknown_after_too_few_values() -> None:
    slow = SlowTime()
    for _ in range(7):
        slow.observe(1.0)
        assert slow.p99 is None
    slow.observe(1.0)
    assert slow.p99 == pytest.approx(1.0)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_it_is_above_nearly_all_values_and_not_far_above(spread: float) -> None:
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


def test_it_follows_a_backend_that_becomes_slower() -> None:
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
