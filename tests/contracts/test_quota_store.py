"""The contract of every quota store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from policies.nouns import FixedBudget, Limits, Organization, Tenant
from policies.quota.budget import Charge, Descriptor, Refused, Reservation, Standing, descriptors
from policies.quota.periods import DAY_MS, Period
from router.shared.store.advances import AdvanceStore
from router.shared.store.base import QuotaStore, StoreFailed
from router.shared.store.guarded import GuardedStore, GuardOptions
from router.shared.store.memory import MemoryStore
from router.shared.store.redis import RedisStore
from router.shared.store.spread import SpreadStore
from tests.policies.builders import a_descriptor, a_reservation
from tests.router.shared.store.parts import HandClock, RedisServer, a_redis, owed, reserved
from tests.shards.attached import eventually

TENANT = a_descriptor(requests_per_minute=60, tokens_per_minute=6000)
AT_MODEL = a_descriptor(model="a model: with {odd} name", tokens_per_minute=600)
BUDGET = a_descriptor(cost_per_day=10)
YEAR_S = 365 * 86_400.0
HALF_A_DAY_S = 43_200.0


@dataclass
class Stage:
    store: QuotaStore | RedisStore
    clock: HandClock = field(default_factory=HandClock)
    guarded: tuple[GuardedStore, ...] = ()

    async def is_settled(self) -> None:
        """Return once Redis has every settlement, as far as it is there."""
        await eventually(lambda: all(store.is_away or store.owed == 0 for store in self.guarded))

    async def left(self, descriptor: Descriptor = TENANT) -> tuple[int | None, ...]:
        standing = await self.standing(descriptor)
        parts = (standing.requests, standing.tokens, standing.cost)
        return tuple(part.remaining for part in parts if part is not None)

    def store_time(self, now_ms: int) -> int:
        """Set the store's clock to `now_ms`, and return it."""
        self.clock.now_s = now_ms / 1000
        return now_ms

    async def standing(self, *descriptors: Descriptor) -> Standing:
        await self.is_settled()
        return await self.store.standing(descriptors or (TENANT,))

    async def settle(self, reservation: Reservation, charge: Charge) -> None:
        if isinstance(self.store, RedisStore):
            await self.store.settle_all([owed(reservation, charge)])
        else:
            self.store.settle(reservation, charge)

    async def reserved(self, reservation: Reservation) -> Reservation:
        answer = await reserved(self.store, reservation)
        assert isinstance(answer, Reservation)
        return answer

    async def refused(self, reservation: Reservation) -> Refused:
        answer = await reserved(self.store, reservation)
        assert isinstance(answer, Refused)
        return answer


@asynccontextmanager
async def in_memory(server: RedisServer) -> AsyncIterator[Stage]:
    clock = HandClock()
    store = MemoryStore(clock)
    yield Stage(store, clock)
    store.check()


@asynccontextmanager
async def in_redis(server: RedisServer) -> AsyncIterator[Stage]:
    clock = HandClock()
    yield Stage(RedisStore(server.url, clock=clock), clock)


@asynccontextmanager
async def guarded(server: RedisServer, url: str | None = None) -> AsyncIterator[Stage]:
    clock = HandClock()
    shared = RedisStore(url or server.url, clock=clock)
    store = GuardedStore(shared, clock=clock, options=GuardOptions(deadline_s=2.0))
    await store.start()
    yield Stage(store, clock, (store,))
    store.check()


@asynccontextmanager
async def in_advance(server: RedisServer) -> AsyncIterator[Stage]:
    async with guarded(server) as stage:
        assert isinstance(stage.store, GuardedStore)
        store = AdvanceStore(stage.store)
        yield Stage(store, stage.clock, stage.guarded)
        store.check()


def guarded_and_gone(server: RedisServer) -> AbstractAsyncContextManager[Stage]:
    return guarded(server, url=f"{server.url}-nowhere")


@asynccontextmanager
async def spread(server: RedisServer) -> AsyncIterator[Stage]:
    """Two databases of one server are as good as two servers."""
    clock, options = HandClock(), GuardOptions(deadline_s=2.0)
    stores = {
        url: GuardedStore(RedisStore(url, clock=clock), clock=clock, options=options)
        for url in (server.url, f"{server.url}?db=1")
    }
    store = SpreadStore(stores)
    await store.start()
    yield Stage(store, clock, tuple(stores.values()))
    for guarded in stores.values():
        guarded.check()


class Opens(Protocol):
    def __call__(self, server: RedisServer) -> AbstractAsyncContextManager[Stage]: ...


STAGES: dict[str, Opens] = {
    "memory": in_memory,
    "redis": in_redis,
    "guarded": guarded,
    "in advance": in_advance,
    "guarded, Redis gone": guarded_and_gone,
    "spread": spread,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(params=list(STAGES))
async def stage(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Stage]:
    server.clean()
    async with STAGES[request.param](server) as stage:
        yield stage
        await stage.store.close()


async def test_a_reservation_takes_from_every_descriptor_and_says_what_is_left(stage: Stage) -> None:
    answer = await stage.reserved(a_reservation("r", TENANT, AT_MODEL, requests=1, tokens=100))
    assert answer.descriptors == (TENANT, AT_MODEL)
    assert answer.standing == await stage.standing(TENANT, AT_MODEL)
    assert await stage.left() == (59, 5900)
    assert await stage.left(AT_MODEL) == (500,)


async def test_a_refusal_takes_from_none(stage: Stage) -> None:
    await stage.reserved(a_reservation("r", TENANT, AT_MODEL, requests=1, tokens=600))
    refused = await stage.refused(a_reservation("s", TENANT, AT_MODEL, requests=1, tokens=1))
    assert (refused.meter.descriptor, refused.retry_after_s) == (AT_MODEL, 0.1)
    assert refused.standing.tokens is not None
    assert refused.standing.tokens.remaining == 0
    assert await stage.left() == (59, 5400)


async def test_after_retry_after_the_same_request_passes_and_not_before(stage: Stage) -> None:
    await stage.reserved(a_reservation("r", TENANT, tokens=6000))
    refused = await stage.refused(a_reservation("s", TENANT, tokens=777))
    assert refused.retry_after_s is not None
    stage.clock.pass_s(refused.retry_after_s - 0.001)
    await stage.refused(a_reservation("s", TENANT, tokens=777))
    stage.clock.pass_s(0.001)
    await stage.reserved(a_reservation("s", TENANT, tokens=777))


async def test_what_was_not_used_is_given_back_and_what_was_missing_is_taken(stage: Stage) -> None:
    first, second = (
        a_reservation("r", TENANT, requests=1, tokens=1000),
        a_reservation("s", TENANT, requests=1, tokens=10),
    )
    await stage.reserved(first)
    await stage.reserved(second)
    await stage.settle(first, Charge(requests=1, tokens=300))
    await stage.settle(second, Charge(requests=1, tokens=200))
    assert await stage.left() == (58, 5500)


async def test_settling_twice_counts_once(stage: Stage) -> None:
    reservation = await stage.reserved(a_reservation("r", TENANT, requests=1, tokens=1000))
    for _ in range(3):
        await stage.settle(reservation, Charge(requests=1, tokens=300))
    assert await stage.left() == (59, 5700)


async def test_reserving_twice_with_one_id_counts_once(stage: Stage) -> None:
    for _ in range(3):
        reservation = await stage.reserved(a_reservation("r", TENANT, requests=1, tokens=1000))
    assert await stage.left() == (59, 5000)
    await stage.settle(reservation, Charge())
    assert await stage.left() == (60, 6000)
    await stage.reserved(a_reservation("r", TENANT, requests=1, tokens=1000))
    assert await stage.left() == (60, 6000)


async def test_a_cancelled_request_is_charged_what_it_used(stage: Stage) -> None:
    reservation = await stage.reserved(a_reservation("r", TENANT, requests=1, tokens=1000))
    await stage.settle(reservation, Charge(requests=1, tokens=17))
    assert await stage.left() == (59, 5983)


async def test_a_prompt_larger_than_a_minutes_limit_is_let_in_when_all_is_free_and_waited_off(stage: Stage) -> None:
    await stage.reserved(a_reservation("r", TENANT, tokens=9000))
    refused = await stage.refused(a_reservation("s", TENANT, tokens=1))
    assert refused.retry_after_s == 30.01


async def test_a_budget_lasts_until_midnight_utc(stage: Stage) -> None:
    await stage.reserved(a_reservation("r", BUDGET, cost=9_999))
    refused = await stage.refused(a_reservation("s", BUDGET, cost=2))
    assert refused.retry_after_s == HALF_A_DAY_S
    never = await stage.refused(a_reservation("s", BUDGET, cost=10_001))
    assert never.retry_after_s is None
    stage.clock.pass_s(HALF_A_DAY_S)
    await stage.reserved(a_reservation("s", BUDGET, cost=10_000))


@pytest.mark.parametrize("period", Period)
async def test_budgets_of_a_period_last_until_its_end_in_every_store(period: Period, stage: Stage) -> None:
    """Redis numbers periods by its own script: the same as ours, at any time."""
    budget, dice = a_descriptor(**{f"cost_per_{period}": 10}), random.Random(period)
    now_ms = round(stage.clock.now_s * 1000)
    for number in range(20):
        now_ms = stage.store_time(now_ms + dice.randrange(400 * DAY_MS))
        begins = period.begins_ms(period.number(now_ms))
        assert await stage.left(budget) == (10,), "the last period is over"
        reservation = await stage.reserved(a_reservation(f"r{number}", budget, cost=10_000))
        await stage.settle(reservation, Charge(cost=10_000))
        refused = await stage.refused(a_reservation(f"s{number}", budget, cost=1))
        assert refused.retry_after_s == period.left_ms(now_ms) / 1000
        now_ms = stage.store_time(max(now_ms, begins + period.left_ms(begins) - 1))
        assert await stage.left(budget) == (0,)
        now_ms = stage.store_time(now_ms + 1)
        assert await stage.left(budget) == (10,)


def a_fixed(first_day: int = 0, last_day: int | None = None, cost: int = 10, tenant: str = "fixed") -> Descriptor:
    return Descriptor(tenant, Limits(fixed=(FixedBudget("launch", cost, first_day, last_day),)))


async def test_a_fixed_budget_counts_what_begins_in_its_days_and_nothing_else(stage: Stage) -> None:
    today = round(stage.clock.now_s) * 1000 // DAY_MS
    budget = a_fixed(today + 1, today + 30)
    # before its first day it binds nothing
    stage.store_time((today + 1) * DAY_MS - 1000)
    early = await stage.reserved(a_reservation("early", budget, cost=50_000))
    assert await stage.left(budget) == ()
    stage.store_time((today + 1) * DAY_MS)
    assert await stage.left(budget) == (10,)
    await stage.settle(early, Charge(cost=50_000))
    assert await stage.left(budget) == (10,), "it began before"
    first = await stage.reserved(a_reservation("first", budget, cost=9_000))
    await stage.settle(first, Charge(cost=7_000))
    assert await stage.left(budget) == (3,)
    # a month later it has not refilled, and never will
    stage.store_time((today + 31) * DAY_MS - 1000)
    refused = await stage.refused(a_reservation("more", budget, cost=4_000))
    assert refused.retry_after_s == 1.0, "from then on it binds nothing"
    late = await stage.reserved(a_reservation("late", budget, cost=3_000))
    stage.store_time((today + 31) * DAY_MS)
    await stage.reserved(a_reservation("after", budget, cost=50_000))
    assert await stage.left(budget) == ()
    await stage.settle(late, Charge(cost=1_000))
    # it was extended: what was used goes on, and what came after its end was not counted
    assert await stage.left(a_fixed(today + 1, today + 60)) == (2,)
    # its first day was put off: it begins anew
    assert await stage.left(a_fixed(today + 31, today + 60)) == (10,)


async def test_a_budget_without_an_end_never_refills(stage: Stage) -> None:
    budget = a_fixed()
    for year in range(3):
        await stage.reserved(a_reservation(f"r{year}", budget, cost=3_000))
        stage.clock.pass_s(YEAR_S)
        # so that no lease is open that lapses
        await stage.settle(a_reservation(f"r{year}", budget, cost=3_000), Charge(cost=3_000))
    assert await stage.left(budget) == (1,)
    refused = await stage.refused(a_reservation("s", budget, cost=2_000))
    assert refused.retry_after_s is None
    assert (
        str(refused.error())
        == "tenant 'fixed' has used its limit of 10 units of cost for 'launch' (ask the operator for more)"
    )


async def test_a_settlement_that_comes_late_counts_only_in_the_days_of_a_fixed_budget(stage: Stage) -> None:
    today = round(stage.clock.now_s) * 1000 // DAY_MS
    future, now = a_fixed(today + 1, tenant="future"), a_fixed(today, tenant="now")
    for budget, left in ((future, 10), (now, 7)):
        await stage.settle(a_reservation("lost", budget, cost=5_000), Charge(cost=3_000))
        await stage.left(budget)  # a guarded store has sent it now
        stage.store_time((today + 1) * DAY_MS)
        assert await stage.left(budget) == (left,)
        stage.store_time(today * DAY_MS)


async def test_a_clock_that_ran_ahead_and_was_set_right_keeps_no_request_out(stage: Stage) -> None:
    both = (TENANT, BUDGET)
    stage.clock.pass_s(YEAR_S)
    early = await stage.reserved(a_reservation("early", *both, tokens=6000, cost=10_000))
    stage.clock.pass_s(-YEAR_S)
    await stage.refused(a_reservation("r", TENANT, tokens=600))
    stage.clock.pass_s(6.0)
    await stage.reserved(a_reservation("s", TENANT, tokens=600))
    await stage.settle(early, Charge(tokens=6000, cost=10_000))
    # a budget belongs to the day on which it is first asked for again
    assert await stage.left(BUDGET) == (0,)
    stage.clock.pass_s(HALF_A_DAY_S)
    await stage.reserved(a_reservation("t", *both, tokens=6000, cost=10_000))


async def test_a_request_belongs_to_the_day_on_which_it_began(stage: Stage) -> None:
    stage.clock.pass_s(HALF_A_DAY_S - 10)
    reservation = await stage.reserved(a_reservation("r", BUDGET, cost=9_000))
    stage.clock.pass_s(20)
    other = await stage.reserved(a_reservation("s", BUDGET, cost=1_000))
    await stage.settle(reservation, Charge(cost=20_000))
    await stage.settle(other, Charge(cost=1_000))
    assert await stage.left(BUDGET) == (9,)


async def test_tenants_do_not_touch_each_other(stage: Stage) -> None:
    other = a_descriptor("labs", tokens_per_minute=10)
    await stage.reserved(a_reservation("r", TENANT, tokens=6000))
    await stage.reserved(a_reservation("s", other, tokens=10))
    assert await stage.left() == (60, 0)


async def test_tenants_of_an_organization_share_its_limit_and_keep_their_own(stage: Stage) -> None:
    whole = Limits(requests_per_minute=3)
    one, two = (
        Tenant(name, name, limits=Limits(requests_per_minute=2), organization=Organization("example", whole))
        for name in "ab"
    )
    await stage.reserved(a_reservation("r", *descriptors(one, "m"), requests=1))
    await stage.reserved(a_reservation("s", *descriptors(one, "m"), requests=1))
    assert str((await stage.refused(a_reservation("t", *descriptors(one, "m"), requests=1))).meter.descriptor) == (
        "tenant 'a'"
    )
    await stage.reserved(a_reservation("u", *descriptors(two, "m"), requests=1))
    refused = await stage.refused(a_reservation("v", *descriptors(two, "m"), requests=1))
    assert str(refused.meter.descriptor) == "organization 'example'"


async def test_a_soft_budget_counts_and_refuses_nothing(stage: Stage) -> None:
    soft = a_descriptor(soft_cost_per_day=10)
    for number in range(3):
        granted = await stage.reserved(a_reservation(str(number), soft, cost=6_000))
        await stage.settle(granted, Charge(cost=6_000))
    if not granted.is_local:
        await stage.is_settled()
        granted = await stage.reserved(a_reservation("last", soft, cost=1))
    if granted.is_local:
        assert granted.standing.near == ()
    else:
        assert [(near.level, near.is_reached) for near in granted.standing.near] == [(18_000, True)]
    assert granted.standing.cost is None


async def test_levels_are_told_of_each_meter_and_of_unused_ones(stage: Stage) -> None:
    month = a_descriptor(model="m", cost_per_month=50, soft_cost_per_month=20)
    granted = await stage.reserved(a_reservation("r", BUDGET, cost=6_000))
    if granted.is_local:
        with pytest.raises(StoreFailed, match="away"):
            await stage.store.levels([BUDGET, month])
        return
    assert list(await stage.store.levels([BUDGET, month])) == [6_000, 0, 0]
    await stage.settle(granted, Charge(cost=2_500))
    await stage.is_settled()
    assert list(await stage.store.levels([BUDGET])) == [2_500]


async def test_each_end_user_has_the_limits_alone(stage: Stage) -> None:
    tenant = Tenant("a", "a", user_limits=Limits(requests_per_minute=1, cost_per_day=1))
    for name in ("ann", "bob", "ann:x", "~"):
        await stage.reserved(a_reservation(f"{name}-1", *descriptors(tenant, "m", user=name), requests=1, cost=1000))
        await stage.refused(a_reservation(f"{name}-2", *descriptors(tenant, "m", user=name), requests=1, cost=1000))


async def test_without_limits_everything_is_let_in(stage: Stage) -> None:
    reservation = await stage.reserved(a_reservation("r", a_descriptor(), requests=1, tokens=10**9))
    assert reservation.standing == Standing()
    await stage.settle(reservation, Charge(1, 1, 1))


async def test_many_at_once_never_get_more_than_there_is(stage: Stage) -> None:
    asked = [a_reservation(str(number), TENANT, requests=1) for number in range(100)]
    answers = await asyncio.gather(*(reserved(stage.store, reservation) for reservation in asked))
    assert sum(isinstance(answer, Reservation) for answer in answers) == 60


async def test_renewing_changes_nothing_that_is_counted(stage: Stage) -> None:
    reservation = await stage.reserved(a_reservation("r", TENANT, tokens=1000))
    await stage.store.renew([reservation])
    await stage.store.renew([])
    assert await stage.left() == (60, 5000)
    assert "Store" in repr(stage.store)
