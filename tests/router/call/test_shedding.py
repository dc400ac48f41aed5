"""While the event loop is late, calls beyond a tenant's share are refused, so that none waits long."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import Overloaded
from policies.nouns import Limits, Tenant
from policies.quota.budget import Charge, Reservation, descriptors
from router.call.admission import Admission, Permit
from router.call.shedding import LATE_S, LEAST_CALLS, Shedding
from router.shared.store.memory import MemoryStore

LOOK_S = 0.05


def an_admission() -> Admission:
    return Admission(MemoryStore(lambda: 0.0))


def a_call(admission: Admission, tenant: str, number: int = 0) -> Permit:
    bound = descriptors(Tenant(tenant, tenant, limits=Limits(concurrent=100_000)), "m", None)
    permit = admission.admit(Reservation(f"{tenant}-{number}", bound, Charge()))
    assert isinstance(permit, Permit)
    return permit


def calls(admission: Admission, **tenants: int) -> None:
    for tenant, count in tenants.items():
        for number in range(count):
            a_call(admission, tenant, number)


def is_refused(shedding: Shedding, tenant: str) -> bool:
    try:
        shedding.refuse_beyond_share(tenant)
    except Overloaded as error:
        return error.retry_after_s is not None
    return False


def test_one_pause_of_the_loop_refuses_nothing() -> None:
    admission, events = an_admission(), list[str]()
    shedding = Shedding(admission, on_event=events.append)
    calls(admission, acme=500)
    for late_s in (0.0, 3.0, 0.0, LATE_S / 2, 1.0, 0.0):
        shedding.looked(late_s)
        assert not is_refused(shedding, "acme")
    assert not events


def test_a_loop_that_stays_late_refuses_the_tenant_that_fills_it_and_no_other() -> None:
    admission, events = an_admission(), list[str]()
    shedding = Shedding(admission, on_event=events.append)
    calls(admission, flood=1_000, acme=3, labs=1)
    for _ in range(3):
        shedding.looked(2 * LATE_S)
    assert events == ["shedding"]
    assert is_refused(shedding, "flood")
    assert not is_refused(shedding, "acme")
    assert not is_refused(shedding, "labs")
    assert not is_refused(shedding, "another one")


def test_few_calls_are_never_refused_since_they_do_not_keep_the_loop_busy() -> None:
    admission, events = an_admission(), list[str]()
    shedding = Shedding(admission, on_event=events.append)
    calls(admission, acme=LEAST_CALLS - 1)
    for _ in range(50):
        shedding.looked(1.0)
        assert not is_refused(shedding, "acme")
    assert not events


@given(st.lists(st.floats(0.0, 5.0), max_size=60), st.integers(0, 400), st.integers(0, 400))
def test_after_any_history_a_loop_that_is_in_time_soon_takes_every_call(
    history: list[float], acme: int, labs: int
) -> None:
    admission = an_admission()
    shedding = Shedding(admission)
    calls(admission, acme=acme, labs=labs)
    for late_s in history:
        shedding.looked(late_s)
    for _ in range(60):
        shedding.looked(0.0)
    assert shedding.share is None
    assert not is_refused(shedding, "acme")


class Core:
    """An event loop that gives each running call one of its `steps` in a turn, each of `step_s`; virtual time."""

    def __init__(self, steps: int, step_s: float, refusal_s: float, *, sheds: bool) -> None:
        self.steps, self.step_s, self.refusal_s = steps, step_s, refusal_s
        self.admission = an_admission()
        self.shedding = Shedding(self.admission)
        self.sheds = sheds
        self.now_s = 0.0
        self.answered: list[tuple[str, float]] = []
        self.refused: Counter[str] = Counter()
        self._running: list[tuple[str, float, int, Permit]] = []
        self._look_at_s = LOOK_S

    def turn(self, arrived: deque[tuple[float, str]]) -> None:
        """Take what has arrived, and give each call its step."""
        begins_s = self.now_s
        self.now_s += 0.0001
        while arrived and arrived[0][0] <= begins_s:
            at_s, tenant = arrived.popleft()
            self.now_s += self.refusal_s
            if self.sheds and is_refused(self.shedding, tenant):
                self.refused[tenant] += 1
                continue
            self._running.append((tenant, at_s, self.steps, a_call(self.admission, tenant, len(self.answered))))
        left = []
        for tenant, at_s, steps, permit in self._running:
            self.now_s += self.step_s
            if steps > 1:
                left.append((tenant, at_s, steps - 1, permit))
                continue
            self.admission.close(permit)
            self.answered.append((tenant, self.now_s - at_s))
        self._running = left
        if self.now_s >= self._look_at_s:
            self.shedding.looked(self.now_s - self._look_at_s)
            self._look_at_s = self.now_s + LOOK_S


def served(per_s: dict[str, int], seconds: float, *, sheds: bool) -> Core:
    """A core that can answer 2,000 requests a second, after an open loop of requests."""
    arrived = deque(sorted((at / rate, tenant) for tenant, rate in per_s.items() for at in range(int(rate * seconds))))
    core = Core(5, 0.0001, 0.00005, sheds=sheds)
    while core.now_s < seconds:
        core.turn(arrived)
    return core


def longest_s(core: Core, tenant: str) -> float:
    """The longest time to an answer, of those in the second half of the run."""
    of_tenant = [took_s for name, took_s in core.answered if name == tenant]
    return max(of_tenant[len(of_tenant) // 2 :])


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_beyond_saturation_answers_come_within_a_bounded_time_at_nearly_the_full_rate(factor: float) -> None:
    rate, seconds = int(2_000 * factor), 8.0
    core = served({"flood": rate - 20, "acme": 20}, seconds, sheds=True)
    assert longest_s(core, "flood") < 2.0
    assert longest_s(core, "acme") < 2.0
    assert len(core.answered) > 0.7 * 2_000 * seconds * (1 - 0.1 * factor)
    assert core.refused["acme"] == 0
    # without a bound the time grows as long as the flood lasts
    assert longest_s(served({"flood": rate - 20, "acme": 20}, seconds, sheds=False), "flood") > 2.0


def test_below_saturation_nothing_is_refused() -> None:
    core = served({"acme": 1_500}, 4.0, sheds=True)
    assert not core.refused
    assert longest_s(core, "acme") < 0.1
