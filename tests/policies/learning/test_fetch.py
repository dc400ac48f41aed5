"""The rate of fetches is learned from what backends report."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.fetch import FIXED_S, TOKEN_S, FetchModel


def test_before_any_fetch_it_is_the_prior() -> None:
    assert FetchModel().rate == (FIXED_S, TOKEN_S)


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.001, 1.3e-6), (0.02, 13e-6), (0.2, 1e-3)])
def test_it_is_learned_from_fetches_of_different_lengths(fixed_s: float, token_s: float) -> None:
    model = FetchModel()
    for _ in range(30):
        for tokens in (64, 2048, 30_000):
            model.observe(1, tokens, fixed_s + tokens * token_s)
    for tokens in (1000, 10_000):
        learned_s = model.rate.fixed_s + tokens * model.rate.token_s
        assert learned_s == pytest.approx(fixed_s + tokens * token_s, rel=0.1)
    model.check()


def test_several_fetches_are_one_observation() -> None:
    model = FetchModel()
    for _ in range(50):
        model.observe(10, 10_000, 1.0)
    assert model.rate.fixed_s + 1000 * model.rate.token_s == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("fetches", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, math.inf), (1, math.nan)]
)
def test_what_is_no_observation_changes_nothing(fetches: int, seconds: float) -> None:
    model = FetchModel()
    model.observe(fetches, 1000, seconds)
    assert model.rate == (FIXED_S, TOKEN_S)


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 10**9), st.floats(1e-9, 1e6)), max_size=40))
def test_coefficients_stay_in_their_bounds(observed: list[tuple[int, int, float]]) -> None:
    model = FetchModel()
    for fetches, tokens, seconds in observed:
        model.observe(fetches, tokens, seconds)
    model.check()
