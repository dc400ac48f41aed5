from __future__ import annotations

import pytest

from policies.nouns import Prices, Usage
from policies.quota.charge import ANSWER_TOKENS, MOST_TOKENS, Charge, charge_of, estimate

PRICES = Prices(uncached=1.0, cached=0.1, output=4.0)


def test_what_was_computed_counts_as_tokens_and_what_was_cached_costs_less() -> None:
    used = Usage(prompt_tokens=1000, completion_tokens=50, cached_tokens=900)
    assert charge_of(used, PRICES) == Charge(requests=1, tokens=150, cost=100_000 + 90_000 + 200_000)


def test_the_estimate_reserves_what_is_believed_to_be_uncached_and_an_answer() -> None:
    assert estimate(1000, uncached_tokens=100, max_new_tokens=50, prices=PRICES) == charge_of(
        Usage(1000, 50, 900), PRICES
    )


def test_without_a_belief_the_whole_prompt_is_reserved_as_uncached() -> None:
    assert estimate(1000, uncached_tokens=None, max_new_tokens=0, prices=PRICES).tokens == 1000
    assert estimate(1000, uncached_tokens=5000, max_new_tokens=0, prices=PRICES).tokens == 1000


@pytest.mark.parametrize(("asked", "reserved"), [(10, 10), (ANSWER_TOKENS, ANSWER_TOKENS), (10**6, ANSWER_TOKENS)])
def test_an_answer_is_reserved_up_to_what_answers_usually_are(asked: int, reserved: int) -> None:
    assert estimate(0, uncached_tokens=0, max_new_tokens=asked, prices=PRICES).tokens == reserved
    assert estimate(0, uncached_tokens=0, max_new_tokens=asked, choices=3, prices=PRICES).tokens == 3 * reserved


@pytest.mark.parametrize("usage", [Usage(-5, -5, -5), Usage(10, 0, 99), Usage(10**30, 10**30, 0)])
def test_a_backend_that_reports_nonsense_is_not_believed(usage: Usage) -> None:
    charge = charge_of(usage, PRICES)
    assert 0 <= charge.tokens <= 2 * MOST_TOKENS
    assert 0 <= charge.cost < 2**53


def test_a_charge_is_never_negative() -> None:
    with pytest.raises(ValueError, match="never negative"):
        Charge(tokens=-1)
