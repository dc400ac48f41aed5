from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.turnover import FadingSum, Turnover


def test_it_stands_at_one_when_every_cache_was_computed_once() -> None:
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
def test_it_is_never_negative_and_never_more_than_the_sum(added: list[tuple[float, float]]) -> None:
    fading, now = FadingSum(half_life=300.0), 0.0
    for amount, pause_s in added:
        now += pause_s
        fading.add(amount, now)
        assert 0.0 <= fading.at(now) <= sum(each for each, _ in added) * (1 + 1e-9)
