"""The section `cost`: prices by model, pool and day, exact decimals, a currency, and budgets in it."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest

from policies.nouns import FixedBudget, Limits
from policies.quota.prices import Prices
from policies.sla.parse import parse

DOLLARS = "{currency: USD, uncached: 0.15, cached: 0.0375, output: 0.6"
POOLS = "pools: {own: {kind: fake, at: 'h:1', models: {m: m}}}"


def a_tenant(limits: str) -> str:
    return f"tenants: {{a: {{anonymous: true, limits: {limits}}}}}"


def test_prices_are_as_exact_as_they_are_written() -> None:
    prices = parse(f"cost: {DOLLARS}}}").prices
    assert (prices.currency, prices.usual) == ("USD", Prices(150_000, 37_500, 600_000))


def test_models_and_pools_have_prices_of_their_own() -> None:
    text = f"{POOLS}\ncost: {DOLLARS}, models: {{m: {{uncached: 2}}}}, pools: {{own: {{output: 0}}}}}}"
    prices = parse(text).prices
    assert prices.of("m", "own") == Prices(2_000_000, 37_500, 0)
    assert prices.of("m", "elsewhere") == Prices(2_000_000, 37_500, 600_000)


def test_an_image_and_a_second_are_priced_in_the_currency() -> None:
    both = "image: 0.002, second: 0.000694444444, cache_write: 0.1875"
    prices = parse(f"cost: {DOLLARS}, {both}}}").prices.usual
    assert (prices.cache_write, prices.image, prices.second) == (187_500, 2_000 * 10**6, 694_444_444)
    assert parse("cost: {image: 2.5}").prices.usual.image == 2_500_000


def test_prices_of_a_day_are_over_those_of_the_days_before() -> None:
    days = "{2027-03-01: {output: 9}, 2027-01-01: {uncached: 5, models: {m: {output: 1}}}}"
    prices = parse(f"cost: {DOLLARS}, from: {days}}}").prices
    seen = [prices.at(datetime(2027, month, 1, tzinfo=UTC).timestamp()) for month in (1, 2, 3)]
    assert [each.usual for each in seen] == [Prices(5_000_000, 37_500, 600_000)] * 2 + [
        Prices(5_000_000, 37_500, 9_000_000)
    ]
    assert seen[2].of("m", "").output == 1_000_000
    before = prices.at(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
    assert before.of("m", "") == Prices(150_000, 37_500, 600_000)


def test_budgets_are_written_in_the_currency_of_the_prices() -> None:
    limits = "{budget_per_hour: 0.5 USD, budget_per_day: 5 USD, budget_per_week: 20 USD, budget_per_month: 50.25 USD}"
    config = parse(f"{a_tenant(limits)}\ncost: {DOLLARS}}}")
    assert config.tenants["a"].limits == Limits(
        cost_per_hour=500_000,
        cost_per_day=5_000_000,
        cost_per_week=20_000_000,
        cost_per_month=50_250_000,
        currency="USD",
    )


def test_a_budget_of_a_fixed_period_has_its_first_and_last_day() -> None:
    launch_for = "{cost: 500 USD, first_day: 2026-12-01, last_day: 2027-01-31}"
    limits = f"{{budgets: {{launch: {launch_for}, all: {{cost: 9 USD, soft: true}}}}}}"
    config = parse(f"{a_tenant(limits)}\ncost: {DOLLARS}}}")
    launch, everything = config.tenants["a"].limits.fixed
    assert launch == FixedBudget("launch", 500_000_000, day("2026-12-01"), day("2027-01-31"))
    assert everything == FixedBudget("all", 9_000_000, is_soft=True)


def day(text: str) -> int:
    return (date.fromisoformat(text) - date(1970, 1, 1)).days


def test_without_a_currency_they_are_in_units() -> None:
    assert parse(a_tenant("{budget_per_month: 5M}")).tenants["a"].limits == Limits(cost_per_month=5_000_000)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (a_tenant("{budget_per_day: 5 USD}"), "is in USD, and prices are in units"),
        (f"{a_tenant('{budget_per_day: 5 EUR}')}\ncost: {DOLLARS}}}", "must be in USD, as the prices are"),
        (f"{a_tenant('{budget_per_day: 5M}')}\ncost: {DOLLARS}}}", "must be in USD, as the prices are"),
        (f"{a_tenant('{budget_per_day: 5.0000001 USD}')}\ncost: {DOLLARS}}}", "at most six decimals"),
        (f"{a_tenant('{budget_per_day: 0 USD}')}\ncost: {DOLLARS}}}", "must be above zero"),
        (f"{a_tenant('{budget_per_day: 5000000 USD}')}\ncost: {DOLLARS}}}", "must be at most 4T units of cost"),
        (f"{a_tenant('{budgets: {x: {cost: 5 EUR}}}')}\ncost: {DOLLARS}}}", "must be in USD, as the prices are"),
        (a_tenant("{budgets: {x: {last_day: 2027-01-01}}}"), "has no cost"),
        (a_tenant("{budgets: {x: {cost: 5, first_day: 2027-01-02, last_day: 2027-01-01}}}"), "ends before it begins"),
        (a_tenant("{budgets: {x: {cost: 5, last_day: 1970-01-03}}}"), "ends before it begins"),
        (a_tenant("{budgets: {x: {cost: 5, last_day: soon}}}"), "must be a day like 2027-01-01"),
        ("cost: {currency: USD, uncached: 1}", "needs the prices of a million tokens (write cached, output)"),
        ("cost: {currency: dollars, uncached: 1, cached: 1, output: 1}", "must be a code of three letters like USD"),
        (f"cost: {DOLLARS}, image: 11}}", "must be at most 10"),
        (f"cost: {DOLLARS}, second: 0.0000000000001}}", "has too many decimals (at most 12 with a currency"),
        ("cost: {image: cheap}", "must be a number like 0.002"),
        ("cost: {output: 0.0000001}", "must be in whole millionths"),
        ("cost: {pools: {elsewhere: {output: 1}}}", "elsewhere"),
        ("cost: {models: {m: {}}}", "has no price (write one of uncached, cached, output, cache_write, image, second)"),
        ("cost: {from: {tomorrow: {output: 1}}}", "must be a day like 2027-01-01"),
        ("cost: {from: {2027-02-30: {output: 1}}}", "must be a day like 2027-01-01"),
    ],
)
def test_a_mistake_is_named(text: str, wrong: str) -> None:
    with pytest.raises(Exception, match=wrong.replace("(", r"\(").replace(")", r"\)")):
        parse(text)
