from __future__ import annotations

import asyncio
import random

import pytest

from policies.errors import BackendFailed, ExpectedError, Overloaded, QuotaExceeded
from policies.nouns import Outcome, Usage
from router.admission import Admission
from router.doors import Doors
from tests.router.parts import a_tenant


async def test_a_tenant_gets_as_many_permits_as_its_limit_says() -> None:
    admission, tenant = Admission(), a_tenant(concurrent=1)
    async with admission.permit(tenant):
        with pytest.raises(QuotaExceeded) as caught:
            async with admission.permit(tenant):
                pass
        assert caught.value.retry_after_s
        async with admission.permit(a_tenant("labs")):
            admission.check()
    async with admission.permit(tenant):
        assert not admission.is_idle()
    assert admission.is_idle()


async def test_all_tenants_together_get_no_more_than_the_server_runs() -> None:
    admission = Admission()
    async with admission.permit(a_tenant()):
        with pytest.raises(Overloaded) as caught:
            async with admission.permit(a_tenant("labs")):
                pass
    assert caught.value.retry_after_s


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
    admission = Admission()
    permit = admission.permit(a_tenant())
    try:
        async with permit:
            permit.spend(Usage(5, 1, 2))
            permit.spend(Usage(5, 2, 0))
            if error is not None:
                raise error
    except (ExpectedError, asyncio.CancelledError):
        pass
    assert permit.outcome is outcome
    assert permit.usage == Usage(10, 3, 2)
    assert admission.settled == {outcome: 1}
    assert admission.is_idle()


@pytest.mark.parametrize("seed", range(20))
async def test_no_permit_is_ever_lost(seed: int) -> None:
    rng, admission = random.Random(seed), Admission()
    tenants = [a_tenant("a", concurrent=2), a_tenant("b")]

    async def request() -> None:
        async with admission.permit(rng.choice(tenants)):
            admission.check()
            await asyncio.sleep(0)
            if rng.random() < 0.3:
                raise BackendFailed("x")

    results = await asyncio.gather(*(request() for _ in range(20)), return_exceptions=True)
    admission.check()
    assert admission.is_idle()
    refused = sum(isinstance(result, QuotaExceeded | Overloaded) for result in results)
    assert admission.settled.total() == 20 - refused


async def test_closed_doors_let_nobody_in_and_tell_when_the_last_one_left() -> None:
    doors = Doors()
    with doors.entered():
        doors.close()
        assert not await doors.emptied(0.0)
        with pytest.raises(Overloaded), doors.entered():
            pass
        doors.check()
    assert await doors.emptied(0.0)
    doors.check()
    assert repr(doors) == "<Doors closed, 0 inside>"
