from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from policies.nouns import FixedBudget, Limits, Organization, Team, Tenant, Usage
from policies.quota.budget import (
    MOST_TOKENS,
    Allowance,
    Charge,
    Descriptor,
    Meter,
    Refused,
    Resource,
    Standing,
    charge_of,
    descriptors,
    estimate,
    meters,
    of_key,
    refusal,
    rounded_cost,
    share,
    standing_of,
)
from policies.quota.periods import DAY_MS, HOUR_MS, Period
from policies.quota.prices import Prices
from tests.policies.builders import a_descriptor


def a_meter(resource: Resource = Resource.TOKENS, limit: int = 60, period: Period = Period.DAY) -> Meter:
    return Meter(a_descriptor(), resource, limit, period if resource is Resource.COST else None)


def test_a_request_answers_to_its_tenant_and_to_the_tenants_limits_at_its_model() -> None:
    at_llama = Limits(requests_per_minute=5)
    tenant = Tenant("acme", "acme", limits=Limits(tokens_per_minute=9), model_limits={"llama": at_llama})
    assert descriptors(tenant, "llama") == (Descriptor("acme", tenant.limits), Descriptor("acme", at_llama, "llama"))
    assert descriptors(tenant, "qwen") == (Descriptor("acme", tenant.limits),)


def test_only_what_is_limited_has_a_meter_and_each_has_a_name_of_its_own() -> None:
    both = [a_descriptor(requests_per_minute=1, tokens_per_minute=2, cost_per_day=3), a_descriptor(model="m")]
    assert [meter.name for meter in meters(both)] == ["requests", "tokens", "cost"]
    assert [meter.name for meter in meters([a_descriptor(model="m", cost_per_day=1, concurrent=7)])] == ["cost:m"]


def test_what_was_taken_from_a_rate_drips_away_at_its_pace() -> None:
    meter = a_meter(limit=60)  # one a second
    assert meter.level(60 * 60_000, 0, now_ms=1000) == 59 * 60_000
    assert meter.level(60 * 60_000, 0, now_ms=60_000) == 0
    assert meter.level(60_000, 5000, now_ms=0) == 60_000  # a clock that went back


def test_a_budget_comes_back_at_midnight_utc_and_not_before() -> None:
    meter = a_meter(Resource.COST, 10)
    assert meter.level(7, 0, now_ms=DAY_MS - 1) == 7
    assert meter.level(7, 0, now_ms=DAY_MS) == 0
    assert meter.wait_ms(10_000, 1, now_ms=DAY_MS - 250) == 250


@pytest.mark.parametrize(
    ("period", "left_ms"),
    [
        (Period.HOUR, HOUR_MS - 1),
        (Period.DAY, DAY_MS - 1),
        (Period.WEEK, 4 * DAY_MS - 1),  # 1970 began on a Thursday
        (Period.MONTH, 31 * DAY_MS - 1),
    ],
)
def test_a_budget_is_whole_again_when_its_period_ends(period: Period, left_ms: int) -> None:
    meter = a_meter(Resource.COST, 10, period)
    at = meter.stamp(1)
    assert meter.wait_ms(10_000, 1, now_ms=1) == left_ms
    assert meter.level(10_000, at, now_ms=left_ms) == 10_000
    assert meter.level(10_000, at, now_ms=1 + left_ms) == 0


def test_budgets_of_all_periods_are_counted_apart_and_the_longest_wait_is_named() -> None:
    both = a_descriptor(cost_per_hour=1, cost_per_day=2, cost_per_week=3, cost_per_month=4)
    metered = meters([both])
    assert [meter.name for meter in metered] == ["cost/hour", "cost", "cost/week", "cost/month"]
    refused = refusal(metered, [1_000, 0, 3_000, 0], Charge(cost=1), now_ms=0)
    assert refused is not None
    assert refused.meter.period is Period.WEEK
    assert refused.error().message == "tenant 'acme' has reached its limit of 3 units of cost a week"


def test_a_budget_in_a_currency_is_shown_in_it() -> None:
    dollars = Descriptor("acme", Limits(cost_per_month=12_500_000, currency="USD"))
    refused = refusal(dollars.meters, [12_400_000_000], Charge(cost=100_000_001), now_ms=0)
    assert refused is not None
    assert refused.error().message == "tenant 'acme' has reached its limit of 12.50 USD a month"
    too_much = refusal(dollars.meters, [0], Charge(cost=12_500_000_001), now_ms=0)
    assert too_much is not None
    assert too_much.error().hint == "it may cost 12.500000001 USD"


@pytest.mark.parametrize(
    ("thousandths", "dollars", "units"),
    [
        (0, "0.00 USD", "0 units of cost"),
        (1, "0.000000001 USD", "0.001 units of cost"),
        (1_539_274, "0.0015 USD", "1,539.27 units of cost"),
        (99_999_999, "0.10 USD", "100,000.00 units of cost"),
        (123_456_789, "0.12 USD", "123,456.79 units of cost"),
        (1_234_567_000_000, "1,234.57 USD", "1,234,567,000 units of cost"),
    ],
)
def test_what_is_used_is_rounded_to_what_people_read(thousandths: int, dollars: str, units: str) -> None:
    assert rounded_cost(thousandths, "USD") == dollars
    assert rounded_cost(thousandths, None) == units


def test_a_fixed_budget_is_named_with_its_last_day() -> None:
    fixed = (FixedBudget("launch", 500_000_000, 20_000, 20_484), FixedBudget("all", 9_000_000, is_soft=True))
    launch, everything = Descriptor("acme", Limits(fixed=fixed, currency="USD")).meters
    assert [meter.name for meter in (launch, everything)] == ["cost/of/launch", "soft/cost/of/all"]
    assert str(launch) == "500.00 USD for 'launch' until 2026-01-31"
    assert str(everything) == "9.00 USD for 'all' (soft)"


def test_a_share_of_a_fixed_budget_is_a_part_of_it() -> None:
    whole = a_descriptor(fixed=(FixedBudget("a", 10, 1, 2), FixedBudget("b", 3)))
    assert share(whole, 4) == a_descriptor(fixed=(FixedBudget("a", 2, 1, 2), FixedBudget("b", 1)))


EVERYTHING = Prices(uncached=1_000, cached=0, output=0, cache_write=1_250, image=2_000_000, second=694_000)


def test_cache_writes_images_and_seconds_have_prices() -> None:
    used = Usage(1_000, 0, 400, cache_write_tokens=200, images=3, backend_ms=1_500)
    parts = 400 * 1_000 + 200 * 1_250 + 3 * 2_000_000 + 694_000 * 3 // 2
    assert charge_of(used, EVERYTHING) == Charge(1, 600, round(parts / 1000))
    assert charge_of(used, EVERYTHING._replace(cache_write=None)).cost == round((parts - 200 * 250) / 1000)
    # an engine that counts more than there can be
    assert charge_of(msgspec.structs.replace(used, cache_write_tokens=10**9), EVERYTHING).cost == round(
        (parts + 400 * 250) / 1000
    )


def test_what_is_reserved_is_not_below_what_such_a_request_costs_at_most() -> None:
    whole = estimate(1_000, uncached_tokens=600, max_new_tokens=0, prices=EVERYTHING, images=3, backend_ms=1_500)
    most = Usage(1_000, 0, 400, cache_write_tokens=600, images=3, backend_ms=1_500)
    assert whole == charge_of(most, EVERYTHING)
    cheap = EVERYTHING._replace(cache_write=10)
    assert estimate(10, uncached_tokens=10, max_new_tokens=0, prices=cheap).cost == 10


def test_a_tag_is_named_in_a_refusal() -> None:
    tenant = Tenant("acme", "acme", tag_limits={"nightly": Limits(requests_per_minute=1), "free": Limits()})
    bound = descriptors(tenant, "m", tags=("free", "nightly"))
    assert [str(one) for one in bound] == ["tenant 'acme'", "tag 'nightly' of tenant 'acme'"]
    assert [meter.name for meter in meters(bound)] == ["requests#nightly"]
    assert bound[1].kind == "tag"


def test_a_charge_is_rounded_once_and_half_up() -> None:
    price = Prices(uncached=0, cached=0, output=500)  # half a thousandth of a unit
    assert [charge_of(Usage(completion_tokens=count), price).cost for count in (0, 1, 2, 3)] == [0, 1, 1, 2]


@pytest.mark.parametrize("now_ms", [0, 1234, DAY_MS - 1])
@pytest.mark.parametrize("limit", [1, 7, 60, 600_000])
@pytest.mark.parametrize("taken", [1, 3, 60, 1_000_000])
def test_after_the_wait_and_not_a_millisecond_sooner_the_same_fits(now_ms: int, limit: int, taken: int) -> None:
    meter = a_meter(limit=limit)
    level, amount = meter.capacity, Charge(tokens=taken).amounts([meter])[0]
    wait = meter.wait_ms(level, amount, now_ms=now_ms)
    assert wait
    for later, fits in ((wait - 1, False), (wait, True)):
        left = meter.level(level, now_ms, now_ms=now_ms + later)
        assert (meter.wait_ms(left, amount, now_ms=now_ms + later) == 0) is fits


def test_a_prompt_longer_than_a_minutes_tokens_is_let_in_when_all_of_them_are_free() -> None:
    meter, prompt = a_meter(limit=600_000), Charge(tokens=1_000_000)
    [amount] = prompt.amounts([meter])
    assert meter.wait_ms(0, amount, now_ms=0) == 0
    assert meter.wait_ms(amount, amount, now_ms=0) == 100_000


def test_a_budget_is_never_overdrawn_knowingly() -> None:
    assert a_meter(Resource.COST, 10).wait_ms(0, 10_001, now_ms=0) is None


@pytest.mark.parametrize("resource", Resource)
def test_a_limit_of_nothing_lets_nothing_in(resource: Resource) -> None:
    meter = a_meter(resource, 0)
    refused = refusal([meter], [0], Charge(1, 1, 1), now_ms=0)
    assert refused is not None
    assert refused.error().retry_after_s is None
    assert refused.error().hint == "ask the operator"


def test_a_refusal_names_the_limit_that_takes_longest() -> None:
    fast, slow = a_meter(limit=60), Meter(a_descriptor(model="llama"), Resource.REQUESTS, 1)
    levels = [fast.capacity, slow.capacity]
    refused = refusal([fast, slow], levels, Charge(requests=1, tokens=1), now_ms=0)
    assert refused is not None
    assert (refused.meter, refused.retry_after_s) == (slow, 60)
    error = refused.error()
    assert error.message == "tenant 'acme' at model 'llama' has reached its limit of 1 requests a minute"
    assert (error.hint, error.retry_after_s) == ("the same request fits in 60 s", 60)


def test_a_refusal_of_the_local_share_says_so() -> None:
    meter = a_meter()
    refused = refusal([meter], [meter.capacity], Charge(tokens=1), now_ms=0)
    assert refused is not None
    assert "share" not in refused.error().hint
    assert (
        msgspec.structs.replace(refused, is_local=True)
        .error()
        .hint.endswith("by this router's share, since the shared store is away")
    )


def test_what_costs_more_than_a_day_has_is_refused_for_good() -> None:
    refused = refusal([a_meter(Resource.COST, 10)], [0], Charge(cost=12_345), now_ms=0)
    assert isinstance(refused, Refused)
    assert refused.error().retry_after_s is None
    assert refused.error().hint == "it may cost 12.345 units of cost"


def test_where_one_stands_is_the_limit_of_which_least_is_left() -> None:
    wide, narrow = a_meter(limit=600), replace(a_meter(limit=60), descriptor=a_descriptor(model="m"))
    cost = a_meter(Resource.COST, 10)
    levels = [599 * 60_000, 30 * 60_000, 2_500]
    assert standing_of([wide, narrow, cost], levels, now_ms=1000) == Standing(
        tokens=Allowance(600, 1, 59.9), cost=Allowance(10, 7, DAY_MS / 1000 - 1)
    )
    assert standing_of([], [], now_ms=0) == Standing()


def test_debt_leaves_nothing_and_takes_longer_to_come_back() -> None:
    assert standing_of([a_meter(limit=60)], [90 * 60_000], now_ms=0).tokens == Allowance(60, 0, 90)


def test_the_shares_of_all_replicas_are_no_more_than_the_limit() -> None:
    whole = a_descriptor(requests_per_minute=10, tokens_per_minute=1, cost_per_day=0, concurrent=5)
    assert share(whole, 1) == whole
    # a limit smaller than the number of replicas still lets something through at each
    assert share(whole, 4) == a_descriptor(requests_per_minute=2, tokens_per_minute=1, cost_per_day=0, concurrent=5)


def test_a_key_is_counted_apart_from_its_tenant_its_models_and_other_keys() -> None:
    tenant = a_tenant_with_models()
    bound = descriptors(tenant, "llama", a_key_descriptor("0a1b2c3d4e5f"))
    assert [str(limit) for limit in bound] == [
        "tenant 'acme'",
        "tenant 'acme' at model 'llama'",
        "key 0a1b2c3d4e5f of tenant 'acme'",
    ]
    names = [meter.name for meter in meters((*bound, a_key_descriptor("ffffffffffff")))]
    assert len(names) == len(set(names)) == 4


def test_a_router_alone_gives_a_key_its_part() -> None:
    part = share(a_key_descriptor("0a1b2c3d4e5f", 10), 4)
    assert (part.key, part.limits.requests_per_minute) == ("0a1b2c3d4e5f", 2)


def test_all_limits_of_a_caller_hold_and_are_counted_in_the_ledger_of_its_organization() -> None:
    most = Limits(requests_per_minute=9)
    team = Team("search", most, {"llama": most})
    tenant = replace(
        a_tenant_with_models(), teams={"search": team}, user_limits=most, organization=Organization("example", most)
    )
    bound = descriptors(tenant, "llama", of_key(tenant, most, "0a1b2c3d4e5f"), team=team, user="ann:b~c")
    assert [str(limit) for limit in bound] == [
        "tenant 'acme'",
        "team 'search' of tenant 'acme'",
        "tenant 'acme' at model 'llama'",
        "team 'search' of tenant 'acme' at model 'llama'",
        "key 0a1b2c3d4e5f of tenant 'acme'",
        "user 'ann:b~c' of tenant 'acme'",
        "organization 'example'",
    ]
    assert {limit.ledger for limit in bound} == {"organization example"}
    metered = meters(bound)
    assert len({meter.id for meter in metered}) == len(metered) == 7
    assert len({limit.id for limit in bound}) == 7


def test_two_tenants_of_an_organization_have_its_meter_in_common_and_no_other() -> None:
    most = Limits(requests_per_minute=9)
    one, two = (Tenant(name, name, limits=most, organization=Organization("example", most)) for name in "ab")
    ids = [{meter.id for meter in meters(descriptors(tenant, "m"))} for tenant in (one, two)]
    assert ids[0] & ids[1] == {("organization example", "requests")}


def test_a_user_is_counted_only_where_users_have_limits() -> None:
    tenant = a_tenant_with_models()
    assert descriptors(tenant, "m", user="ann") == descriptors(tenant, "m")


def test_a_soft_budget_refuses_nothing_and_is_named_when_it_is_near_its_end() -> None:
    bound = (a_descriptor(soft_cost_per_day=10, cost_per_day=20),)
    hard, soft = meters(bound)
    charge = Charge(cost=5_000)
    assert refusal((hard, soft), [14_000, 14_000], charge, now_ms=0) is None
    standing = standing_of((hard, soft), [9_000, 9_000], now_ms=0)
    assert [(str(near.meter), near.percent, near.is_reached) for near in standing.near] == [
        ("10 units of cost a day (soft)", 90, False)
    ]
    assert standing.cost is not None
    assert standing.cost.limit == 20
    refused = refusal((hard, soft), [16_000, 16_000], charge, now_ms=0)
    assert refused is not None
    # a budget that refuses is reached, even if a smaller request would fit
    assert [(near.percent, near.is_reached) for near in refused.standing.near] == [(80, True), (160, True)]


@pytest.mark.parametrize(("level", "near"), [(0, 0), (7_999, 0), (8_000, 1), (10_000, 1)])
def test_a_budget_is_near_its_end_from_80_percent_on(level: int, near: int) -> None:
    metered = meters([a_descriptor(cost_per_day=10, tokens_per_minute=1)])
    assert len(standing_of(metered, [60_000, level], now_ms=0).near) == near


def a_key_descriptor(key: str, most: int = 1) -> Descriptor:
    return Descriptor("acme", Limits(requests_per_minute=most), key=key)


def a_tenant_with_models() -> Tenant:
    limits = Limits(requests_per_minute=5)
    return Tenant("acme", "acme", limits=limits, model_limits={"llama": limits})


PRICES = Prices(uncached=1_000_000, cached=100_000, output=4_000_000)


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


@pytest.mark.parametrize(("asked", "reserved"), [(10, 10), (1024, 1024), (10**6, 1024)])
def test_an_answer_is_reserved_up_to_what_answers_usually_are(asked: int, reserved: int) -> None:
    assert estimate(0, uncached_tokens=0, max_new_tokens=asked, prices=PRICES).tokens == reserved
    assert estimate(0, uncached_tokens=0, max_new_tokens=asked, choices=3, prices=PRICES).tokens == 3 * reserved


@pytest.mark.parametrize("usage", [Usage(-5, -5, -5), Usage(10, 0, 99), Usage(10**30, 10**30, 0)])
def test_a_backend_that_reports_nonsense_is_not_believed(usage: Usage) -> None:
    charge = charge_of(usage, PRICES)
    assert 0 <= charge.tokens <= 2 * MOST_TOKENS
    assert 0 <= charge.cost < 2**53
