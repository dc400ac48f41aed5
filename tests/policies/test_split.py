"""How pools share the requests of a rule, and when one of them loses its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.split import CHANCE, Split, Tally, why_worse

CANARY = Split((("stable", 0.95), ("canary", 0.05)))
PARTS = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5)


def a_split(parts: list[float]) -> Split:
    return Split(tuple((f"p{at}", part / sum(parts)) for at, part in enumerate(parts)))


def test_twenty_thousand_requests_are_divided_within_half_a_percent() -> None:
    counts = {"stable": 0, "canary": 0}
    for number in range(20_000):
        counts[CANARY.pool_of(f"acme {number}")] += 1
    assert counts["canary"] / 20_000 == pytest.approx(0.05, abs=0.005)


@given(PARTS, st.text())
def test_a_key_has_one_pool_of_the_split(parts: list[float], key: str) -> None:
    split = a_split(parts)
    assert split.pool_of(key) == split.pool_of(key)
    assert split.pool_of(key) in dict(split.shares)


@given(PARTS, st.text())
def test_what_a_pool_loses_goes_to_the_stable_one_and_all_else_stays(parts: list[float], key: str) -> None:
    split = a_split(parts)
    before = split.pool_of(key)
    for lost in dict(split.shares):
        after = split.pool_of(key, without={lost})
        assert after == (split.stable if before == lost else before)


@given(st.floats(0.001, 0.4), st.floats(0.0, 0.09), st.text())
def test_a_canary_keeps_its_keys_while_its_share_grows(small: float, more: float, key: str) -> None:
    before, after = (Split((("canary", share), ("stable", 1 - share))) for share in (small, small + more))
    if before.pool_of(key) == "canary":
        assert after.pool_of(key) == "canary"


def worse(canary: Tally, stable: Tally) -> str | None:
    return why_worse(canary, stable, may_miss=0.05)


WELL = Tally(1000, 2, 20)


def test_a_pool_that_fails_loses_its_share_at_the_third_request() -> None:
    assert worse(Tally(2, failed=2), WELL) is None
    assert worse(Tally(3, failed=3), WELL) == "3 of 3 requests failed, and 2 of 1000 at the stable pool"
    assert worse(Tally(3, failed=3), Tally()) is not None, "with nothing to compare it with, too"


def test_a_pool_that_misses_targets_loses_its_share_after_a_cold_start() -> None:
    assert worse(Tally(9, missed=9), WELL) is None
    assert worse(Tally(12, missed=12), WELL) == "12 of 12 requests missed a target, and 20 of 1000 at the stable pool"


@pytest.mark.parametrize(
    ("canary", "stable"),
    [
        (Tally(100, failed=1), WELL),
        (Tally(100, missed=6), WELL),
        # both are as bad
        (Tally(100, failed=30), Tally(1000, failed=300)),
        (Tally(100, missed=90), Tally(1000, missed=900)),
        (Tally(100, failed=100), Tally(100, failed=100)),
        (Tally(), Tally()),
    ],
)
def test_a_pool_that_does_as_well_keeps_its_share(canary: Tally, stable: Tally) -> None:
    assert worse(canary, stable) is None


@given(st.integers(1, 500), st.data())
def test_what_chance_brings_often_is_no_reason(count: int, data: st.DataObject) -> None:
    """The bound is at least the binomial tail, computed here by summing it."""
    failed = data.draw(st.integers(0, count))
    probability, term = 0.0, 0.99**count
    for hits in range(count + 1):
        probability += term if hits >= failed else 0.0
        term *= (count - hits) / (hits + 1) * 0.01 / 0.99
    if worse(Tally(count, failed=failed), Tally(10**9)) is not None:
        assert probability <= CHANCE
