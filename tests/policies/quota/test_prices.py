"""Prices of a pool come before those of a model, and those before the usual ones; they may change on a day."""

from __future__ import annotations

from policies.quota.prices import PriceList, Prices, SomePrices

USUAL = Prices(1_000_000, 100_000, 4_000_000)
PRICES = PriceList(
    USUAL,
    models={"big": SomePrices(uncached=3_000_000), "tiny": SomePrices(output=0)},
    pools={"rented": SomePrices(output=9_000_000), "owned": SomePrices(0, 0, 0)},
)


def test_a_price_that_is_not_given_is_that_of_the_entry_above() -> None:
    assert PRICES.of("other", "other") == USUAL
    assert PRICES.of("big", "other") == Prices(3_000_000, 100_000, 4_000_000)
    assert PRICES.of("tiny", "rented") == Prices(1_000_000, 100_000, 9_000_000)
    assert PRICES.of("big", "owned") == Prices(0, 0, 0)


def test_before_the_pool_is_known_each_token_has_its_highest_price_among_the_pools() -> None:
    assert PRICES.highest("big", ("owned", "rented")) == Prices(3_000_000, 100_000, 9_000_000)
    assert PRICES.highest("big", ("owned",)) == Prices(0, 0, 0)
    assert PRICES.highest("big", ("owned", "without")) == Prices(3_000_000, 100_000, 4_000_000)
    assert PRICES.highest("tiny", None) == Prices(1_000_000, 100_000, 9_000_000)
    assert PRICES.highest("tiny", ()) == Prices(1_000_000, 100_000, 0)
    assert PriceList(USUAL).highest("tiny", None) == USUAL


def test_a_cache_write_costs_as_any_computed_token_unless_it_has_a_price() -> None:
    dear = PriceList(USUAL, pools={"a": SomePrices(cache_write=1_250_000), "b": SomePrices(uncached=2_000_000)})
    assert (dear.of("m", "a").written, dear.of("m", "b").written) == (1_250_000, 2_000_000)
    assert dear.highest("m", ("a", "b")) == Prices(2_000_000, 100_000, 4_000_000, 2_000_000)
    assert dear.highest("m", ("b",)).cache_write is None


def test_prices_change_at_the_beginning_of_their_day() -> None:
    second, third = PriceList(Prices(2, 2, 2)), PriceList(Prices(3, 3, 3))
    prices = PriceList(USUAL, later=((1000.0, second), (2000.0, third)))
    assert [prices.at(now).usual.uncached for now in (0, 999.9, 1000, 1999.9, 2000, 1e12)] == [
        1_000_000,
        1_000_000,
        2,
        2,
        3,
        3,
    ]
