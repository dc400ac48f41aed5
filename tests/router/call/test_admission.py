"""The way in: closed doors admit no call, and each running call has a permit, reserved before and settled after."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from policies.errors import BackendFailed, CutOff, ExpectedError, Overloaded, QuotaExceeded, Unavailable
from policies.nouns import Limits, Outcome, Tenant, Usage
from policies.quota.budget import Charge, Descriptor, Near, Refused, Reservation, Standing, descriptors
from policies.quota.prices import Prices
from router.call.admission import Admission, Doors, Permit, Stay, Tell
from router.shared.store.memory import MemoryStore
from tests.router.parts import a_tenant

PRICES = Prices(uncached=1_000_000, cached=0, output=2_000_000)


def an_admission() -> tuple[Admission, MemoryStore]:
    store = MemoryStore(lambda: 1000.0)
    return Admission(store), store


class Asks:
    """Makes what calls ask for, with ids of their own."""

    def __init__(self) -> None:
        self._ids = itertools.count()

    def __call__(self, tenant: Tenant, model: str = "tiny", tokens: int = 10) -> Reservation:
        charge = Charge(1, tokens, tokens * 1000)
        return Reservation(f"c{next(self._ids)}", descriptors(tenant, model), charge)


what_is_asked = Asks()


async def admitted(admission: Admission, asked: Reservation, tell: Tell = lambda _: None) -> Permit:
    permit = admission.admit(asked, tell)
    return permit if isinstance(permit, Permit) else await permit


async def test_a_tenant_gets_as_many_permits_as_its_limit_says() -> None:
    (admission, _), tenant = an_admission(), a_tenant(concurrent=1)
    with await admitted(admission, what_is_asked(tenant)):
        with pytest.raises(QuotaExceeded, match="tenant 'acme' has 1 requests running") as caught:
            await admitted(admission, what_is_asked(tenant))
        assert caught.value.retry_after_s
        with await admitted(admission, what_is_asked(a_tenant("labs"))):
            admission.check()
    with await admitted(admission, what_is_asked(tenant)):
        assert not admission.is_idle()
    assert admission.is_idle()


async def test_a_model_may_have_a_limit_of_its_own() -> None:
    (admission, _), tenant = an_admission(), a_tenant(model_limits={"big": Limits(concurrent=1)})
    with await admitted(admission, what_is_asked(tenant, "big")):
        with pytest.raises(QuotaExceeded, match="at model 'big'"):
            await admitted(admission, what_is_asked(tenant, "big"))
        with await admitted(admission, what_is_asked(tenant, "small")):
            admission.check()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, Outcome.FINISHED),
        (BackendFailed("x"), Outcome.FAILED),
        (Overloaded("x"), Outcome.REJECTED),
        (asyncio.CancelledError(), Outcome.CANCELLED),
    ],
)
async def test_a_permit_is_settled_with_how_it_ended_and_what_was_used(
    error: BaseException | None, outcome: Outcome
) -> None:
    (admission, store), tenant = an_admission(), a_tenant(limits=Limits(tokens_per_minute=1000))
    permit = await admitted(admission, what_is_asked(tenant, tokens=100))
    try:
        with permit:
            permit.spend(Usage(5, 1, 2), PRICES)
            permit.spend(Usage(5, 2, 0), PRICES)
            if error is not None:
                raise error
    except (ExpectedError, asyncio.CancelledError):
        pass
    assert permit.outcome is outcome
    assert permit.usage == Usage(10, 3, 2)
    assert admission.settled == {outcome: 1}
    assert admission.is_idle()
    left = (await store.standing(permit.asked.descriptors)).tokens
    # of 10 prompt tokens 2 were cached, and 3 were drawn
    assert left is not None
    assert left.remaining == 1000 - 8 - 3
    store.check()


async def test_limits_are_reported_before_it_runs_and_when_it_is_refused() -> None:
    (admission, _), tenant = an_admission(), a_tenant(limits=Limits(requests_per_minute=2))
    standings: list[Standing] = []
    for _ in range(2):
        with await admitted(admission, what_is_asked(tenant), standings.append):
            pass
    with pytest.raises(QuotaExceeded, match="has reached its limit of 2 requests a minute") as caught:
        await admitted(admission, what_is_asked(tenant), standings.append)
    assert [standing.requests.remaining for standing in standings if standing.requests] == [1, 0, 0]
    assert caught.value.retry_after_s == 30.0
    assert admission.is_idle()
    admission.check()


async def test_a_tenant_without_limits_never_asks_the_store() -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise AssertionError("no store may be asked")

    store = MemoryStore(lambda: 0.0)
    store.reserve = away
    admission = Admission(store)
    with await admitted(admission, what_is_asked(a_tenant())) as permit:
        permit.spend(Usage(1, 1, 0), PRICES)
    assert admission.is_idle()


class Elsewhere(MemoryStore):
    """Answers a moment later, as a store in another program does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        here = self.reserve

        async def later(asked: Reservation) -> Reservation | Refused:
            await asyncio.sleep(0)
            return here(asked)

        reserve: Any = later
        self.reserve = reserve


async def test_a_call_that_is_cancelled_while_its_store_is_asked_leaves_no_permit() -> None:
    admission = Admission(Elsewhere(lambda: 1000.0))
    tenant = a_tenant(concurrent=1, limits=Limits(requests_per_minute=1))
    asking = asyncio.create_task(admitted(admission, what_is_asked(tenant)))
    await asyncio.sleep(0)
    assert admission.running("acme") == 1, "others come in meanwhile"
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    admission.check()
    assert admission.is_idle()


@pytest.mark.parametrize("kind", [MemoryStore, Elsewhere])
@pytest.mark.parametrize("seed", range(20))
async def test_no_permit_is_ever_lost(seed: int, kind: type[MemoryStore]) -> None:
    rng, store = random.Random(seed), kind(lambda: 1000.0)
    admission = Admission(store)
    tenants = [a_tenant("a", concurrent=2), a_tenant("b", limits=Limits(requests_per_minute=8)), a_tenant("c")]

    async def request() -> None:
        with await admitted(admission, what_is_asked(rng.choice(tenants))):
            admission.check()
            await asyncio.sleep(0)
            if rng.random() < 0.3:
                raise BackendFailed("x")

    results = await asyncio.gather(*(request() for _ in range(20)), return_exceptions=True)
    admission.check()
    store.check()
    assert admission.is_idle()
    refused = sum(isinstance(result, QuotaExceeded) for result in results)
    assert admission.settled.total() == 20 - refused


async def test_a_key_may_have_limits_of_its_own_within_its_tenants() -> None:
    (admission, _), tenant = an_admission(), a_tenant(concurrent=2)
    keyed = Descriptor("acme", Limits(concurrent=1), key="0a1b2c3d4e5f")

    def with_key() -> Reservation:
        asked = what_is_asked(tenant)
        return replace(asked, descriptors=(*asked.descriptors, keyed))

    with await admitted(admission, with_key()):
        with pytest.raises(QuotaExceeded, match="key 0a1b2c3d4e5f of tenant 'acme' has 1 requests running"):
            await admitted(admission, with_key())
        assert admission.running("acme") == 1
        with await admitted(admission, what_is_asked(tenant)):
            admission.check()
            with pytest.raises(QuotaExceeded, match=r"^tenant 'acme' has 2"):
                await admitted(admission, with_key())
    admission.check()
    assert admission.is_idle()


async def test_closed_doors_admit_no_call_and_report_when_the_last_one_left() -> None:
    doors = Doors()
    with Stay(doors):
        doors.close()
        assert not await doors.emptied(0.0)
        with pytest.raises(Unavailable, match="another replica") as caught, Stay(doors):
            pass
        assert caught.value.retry_after_s
        doors.check()
    assert await doors.emptied(0.0)
    doors.check()
    assert repr(doors) == "<Doors closed, 0 inside>"


async def test_a_call_that_is_ended_gets_the_reason_and_cleans_up_first() -> None:
    doors, let_go = Doors(), asyncio.Event()

    async def call() -> None:
        with Stay(doors):
            try:
                await asyncio.Event().wait()
            finally:
                let_go.set()

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0)
    doors.turn_out()
    doors.turn_out()
    assert await doors.emptied(5)
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(end) for end in ends] == [CutOff] * 3
    assert let_go.is_set()
    doors.check()


async def test_other_ends_stay_what_they_are() -> None:
    doors = Doors()
    with pytest.raises(TimeoutError), Stay(doors):
        raise TimeoutError
    leaving = asyncio.create_task(_stay(doors))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    doors.check()


async def test_a_call_that_its_client_leaves_while_it_is_ended_is_cancelled() -> None:
    doors = Doors()
    leaving = asyncio.create_task(_stay(doors))
    await asyncio.sleep(0)
    leaving.cancel()
    doors.turn_out()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert doors.inside == 0


async def _stay(doors: Doors) -> None:
    with Stay(doors):
        await asyncio.Event().wait()


class Told(list[tuple[int, bool]]):
    """What is told of budgets that are near their end: the part that is used, in percent, and whether it is reached."""

    def near(self, budgets: Sequence[Near]) -> None:
        self.extend((budget.percent, budget.is_reached) for budget in budgets)


async def test_a_budget_is_near_its_end_by_what_is_settled_and_not_by_what_requests_reserve() -> None:
    told, heard = Told(), list[Standing]()
    admission = Admission(MemoryStore(lambda: 1000.0), on_near=told.near, look_s=0.0)
    tenant = a_tenant(limits=Limits(cost_per_day=1000))
    # each reserves 110 of 1,000 units, and costs 10
    for _ in range(3):
        permits = [await admitted(admission, what_is_asked(tenant, tokens=110), heard.append) for _ in range(7)]
        for permit in permits:
            permit.spend(Usage(10, 0), PRICES)
            permit.settle(None)
        await asyncio.sleep(0.01)
        admission.check()
    assert told == []
    assert not any(standing.near for standing in heard)
    # 210 units are used; now one uses more than it reserved, and no further request comes
    permit = await admitted(admission, what_is_asked(tenant, tokens=110))
    permit.spend(Usage(600, 0), PRICES)
    permit.settle(None)
    await asyncio.sleep(0.01)
    assert told == [(81, False)]
    # a client of the next request sees that, too
    permit = await admitted(admission, what_is_asked(tenant, tokens=110), heard.append)
    assert [(near.percent, near.is_reached) for near in heard[-1].near] == [(81, False)]
    permit.spend(Usage(200, 0), PRICES)
    permit.settle(None)
    await asyncio.sleep(0.01)
    assert told[-1] == (101, True)
    admission.check()


@pytest.mark.parametrize("seed", range(5))
async def test_alarms_are_told_exactly_from_four_fifths_on_whatever_is_reserved_meanwhile(seed: int) -> None:
    rng, told = random.Random(seed), Told()
    admission = Admission(MemoryStore(lambda: 1000.0), on_near=told.near, look_s=0.0)
    tenant = a_tenant(limits=Limits(cost_per_day=1000))
    used, running = 0, list[Permit]()
    for _ in range(300):
        if running and rng.random() < 0.5:
            permit, cost = running.pop(rng.randrange(len(running))), rng.choice((0, 1, 5, 20))
            permit.spend(Usage(cost, 0), PRICES)
            permit.settle(None)
            used += cost
        else:
            try:
                running.append(await admitted(admission, what_is_asked(tenant, tokens=rng.choice((5, 50)))))
            except QuotaExceeded:
                assert used or running
        await asyncio.sleep(0.001)
        assert bool(told) == (used >= 800), f"{used} of 1000 units are used"
    for permit in running:
        permit.settle(None)
    admission.check()
