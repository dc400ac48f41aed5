from __future__ import annotations

import random
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.quota.budget import COST_UNIT, MINUTE_MS, Charge, Descriptor, Refused, Reservation, Settlement
from policies.quota.ledger import KEPT_S, Ledger
from tests.policies.builders import a_descriptor, a_reservation

DAY_S = 86_400.0
TOKENS = a_descriptor(tokens_per_minute=60)  # one comes back each second
COST = a_descriptor(cost_per_day=10)


def left(ledger: Ledger, descriptor: Descriptor, now: float) -> int:
    """What the next request may take."""
    found = {
        meter.counts: max(0, meter.capacity - level) // (MINUTE_MS if meter.period is None else COST_UNIT)
        for meter, level in zip(descriptor.meters, ledger.levels([descriptor], now=now), strict=True)
    }
    return next(found[counts] for counts in ("tokens", "cost", "requests") if counts in found)


def test_what_was_reserved_too_much_is_given_back() -> None:
    ledger = Ledger()
    asked = a_reservation("r", TOKENS, tokens=60)
    assert isinstance(ledger.reserve(asked, now=0), Reservation)
    assert left(ledger, TOKENS, 0) == 0
    assert ledger.settle(asked, Charge(tokens=10), now=0) is Settlement.SETTLED
    assert left(ledger, TOKENS, 0) == 50
    ledger.check()


def test_what_was_reserved_too_little_is_taken_into_debt() -> None:
    ledger = Ledger()
    asked = a_reservation("r", TOKENS, tokens=50)
    ledger.reserve(asked, now=0)
    ledger.settle(asked, Charge(tokens=80), now=0)
    refused = ledger.reserve(a_reservation("next", TOKENS, tokens=1), now=0)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == 21
    ledger.check()


def test_what_came_back_by_itself_meanwhile_is_not_given_back_twice() -> None:
    ledger = Ledger()
    asked = a_reservation("r", TOKENS, tokens=60)
    ledger.reserve(asked, now=0)
    ledger.settle(asked, Charge(tokens=10), now=40)
    assert left(ledger, TOKENS, 40) == 60
    ledger.check()


def test_settling_again_changes_nothing_and_says_so() -> None:
    ledger = Ledger()
    asked = a_reservation("r", TOKENS, tokens=5)
    ledger.reserve(asked, now=0)
    ledger.settle(asked, Charge(tokens=5), now=0)
    assert ledger.settle(asked, Charge(tokens=5), now=0) is Settlement.AGAIN
    assert left(ledger, TOKENS, 0) == 55


def test_reserving_again_with_the_same_id_takes_nothing_again_open_or_settled() -> None:
    ledger = Ledger()
    asked = a_reservation("r", TOKENS, tokens=40)
    for _ in range(3):
        assert isinstance(ledger.reserve(asked, now=0), Reservation)
    assert left(ledger, TOKENS, 0) == 20
    ledger.settle(asked, Charge(), now=0)
    assert isinstance(ledger.reserve(asked, now=0), Reservation)
    assert left(ledger, TOKENS, 0) == 60
    ledger.check()


def test_all_descriptors_give_or_none_does() -> None:
    ledger, at_model = Ledger(), a_descriptor(model="m", tokens_per_minute=5)
    refused = ledger.reserve(a_reservation("a", TOKENS, at_model, tokens=5), now=0)
    assert isinstance(refused, Reservation)
    refused = ledger.reserve(a_reservation("b", TOKENS, at_model, tokens=5), now=0)
    assert isinstance(refused, Refused)
    assert refused.meter.descriptor == at_model
    assert left(ledger, TOKENS, 0) == 55


def test_after_retry_after_the_same_request_passes_and_not_before() -> None:
    ledger = Ledger()
    ledger.reserve(a_reservation("a", TOKENS, tokens=60), now=1_700_000_000.123)
    refused = ledger.reserve(a_reservation("b", TOKENS, tokens=7), now=1_700_000_000.123)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s is not None
    at = 1_700_000_000.123 + refused.retry_after_s
    assert isinstance(ledger.reserve(a_reservation("b", TOKENS, tokens=7), now=at - 0.001), Refused)
    assert isinstance(ledger.reserve(a_reservation("b", TOKENS, tokens=7), now=at), Reservation)


def test_the_reservation_of_a_crashed_router_lapses_and_is_given_back_whole() -> None:
    ledger = Ledger(lease_s=10)
    ledger.reserve(a_reservation("r", COST, cost=9_000), now=0)
    ledger.expire(9.999)
    assert left(ledger, COST, 9.999) == 1
    ledger.expire(10)
    assert left(ledger, COST, 10) == 10
    ledger.check()


def test_a_lease_that_is_renewed_does_not_lapse() -> None:
    ledger = Ledger(lease_s=10)
    for name in ("lives", "dies"):
        ledger.reserve(a_reservation(name, COST, cost=4_000), now=0)
    ledger.renew(["lives", "unknown"], now=8)
    assert left(ledger, COST, 17) == 6
    assert left(ledger, COST, 18) == 10


def test_after_a_clock_was_set_back_reservations_lapse_and_are_forgotten_as_if_made_then() -> None:
    ledger = Ledger(lease_s=10, kept_s=20)
    settled = a_reservation("settled", COST, cost=1_000)
    ledger.reserve(settled, now=1000)
    ledger.settle(settled, Charge(cost=1_000), now=1000)
    ledger.reserve(a_reservation("open", COST, cost=4_000), now=1000)
    ledger.expire(100)
    assert repr(ledger).startswith("<Ledger 1 open, 1 settled lately")
    ledger.expire(110)
    assert repr(ledger).startswith("<Ledger 0 open, ")
    # the lapsed one is remembered from when it lapsed
    ledger.expire(120)
    assert ledger.settle(settled, Charge(cost=1_000), now=120) is not Settlement.AGAIN
    ledger.check()


def test_what_was_used_is_charged_in_full_even_if_the_reservation_lapsed_meanwhile() -> None:
    ledger = Ledger(lease_s=10)
    asked = a_reservation("r", COST, cost=9_000)
    ledger.reserve(asked, now=0)
    assert ledger.settle(asked, Charge(cost=3_000), now=20) is Settlement.LATE
    assert ledger.settle(asked, Charge(cost=3_000), now=20) is Settlement.AGAIN
    assert left(ledger, COST, 20) == 7
    ledger.check()


def test_a_request_belongs_to_the_day_on_which_it_began() -> None:
    ledger = Ledger()
    asked = a_reservation("r", COST, cost=9_000)
    ledger.reserve(asked, now=DAY_S - 1)
    ledger.reserve(a_reservation("next", COST, cost=1_000), now=DAY_S + 1)
    ledger.settle(asked, Charge(cost=20_000), now=DAY_S + 2)
    assert left(ledger, COST, DAY_S + 2) == 9
    ledger.check()


def test_a_charge_that_another_router_allowed_is_taken_even_into_debt() -> None:
    ledger = Ledger()
    for name in ("a", "b"):
        ledger.grant(a_reservation(name, TOKENS, tokens=60), now=0)
        ledger.grant(a_reservation(name, TOKENS, tokens=60), now=0)
    assert ledger.standing([TOKENS], now=0).tokens is not None
    refused = ledger.reserve(a_reservation("c", TOKENS, tokens=1), now=0)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == 61


def test_what_others_took_counts_too_and_drips_away_likewise() -> None:
    ledger = Ledger()
    asked = a_reservation("r", TOKENS, tokens=10)
    ledger.reserve(asked, now=0)
    ledger.learn([TOKENS], [40 * 60_000], now=0)
    ledger.learn([TOKENS], [5 * 60_000], now=0)
    assert left(ledger, TOKENS, 0) == 20
    assert left(ledger, TOKENS, 30) == 50
    ledger.settle(asked, Charge(tokens=10), now=30)
    ledger.check()


def test_a_changed_limit_counts_at_once() -> None:
    ledger = Ledger()
    ledger.reserve(a_reservation("a", TOKENS, tokens=60), now=0)
    wider = a_descriptor(tokens_per_minute=100)
    assert isinstance(ledger.reserve(a_reservation("b", wider, tokens=40), now=0), Reservation)
    ledger.check()


def test_what_is_over_is_forgotten() -> None:
    ledger = Ledger(lease_s=10)
    for number in range(100):
        asked = a_reservation(str(number), a_descriptor(f"tenant-{number}", tokens_per_minute=60), tokens=60)
        ledger.reserve(asked, now=0)
        if number % 2:
            ledger.settle(asked, Charge(tokens=60), now=0)
    assert repr(ledger) == "<Ledger 50 open, 50 settled lately, 100 meters>"
    ledger.expire(KEPT_S)
    assert repr(ledger) == "<Ledger 0 open, 0 settled lately, 0 meters>"
    ledger.check()


def test_a_ledger_with_a_clock_needs_no_times_and_one_without_says_that_it_does() -> None:
    asked = a_reservation("r", TOKENS, tokens=60)
    ledger = Ledger(clock=lambda: 5.0)
    assert isinstance(ledger.reserve(asked), Reservation)
    assert left(ledger, TOKENS, 15.0) == 10
    assert ledger.settle(asked, Charge(tokens=30)) is Settlement.SETTLED
    assert left(ledger, TOKENS, 15.0) == 40
    with pytest.raises(TypeError, match="needs `now`"):
        Ledger().reserve(asked)


def test_a_settled_reservation_is_forgotten_soon_after_its_time_however_many_requests_come() -> None:
    ledger = Ledger(kept_s=1.0)
    for number in range(3000):
        asked = a_reservation(f"r{number}", TOKENS, tokens=1)
        ledger.reserve(asked, now=number / 1000)
        ledger.settle(asked, Charge(), now=number / 1000)
    assert len(ledger._settled) <= 1101
    ledger.check()


def test_without_limits_nothing_is_counted() -> None:
    ledger = Ledger()
    assert isinstance(ledger.reserve(a_reservation("r", a_descriptor(), tokens=10**9), now=0), Reservation)
    ledger.check()


@pytest.mark.parametrize("broken", ["taken", "holders"])
def test_a_ledger_that_does_not_balance_is_found_out(broken: str) -> None:
    ledger = Ledger()
    ledger.reserve(a_reservation("r", TOKENS, tokens=5), now=0)
    (bucket,) = ledger._buckets.values()
    setattr(bucket, broken, getattr(bucket, broken) + 1)
    with pytest.raises(AssertionError, match=r"does not balance|holders"):
        ledger.check()


# -- ten thousand random operations against the other form of the algorithm

LIMITED = (
    a_descriptor("a", requests_per_minute=50, tokens_per_minute=7_000),
    a_descriptor("a", model="m", tokens_per_minute=4_321),
    a_descriptor("b", tokens_per_minute=60_000),
)
ASKED_OF = (LIMITED[:1], LIMITED[:2], LIMITED[2:])


@dataclass
class VirtualSchedule:
    """The GCRA in its first form, by theoretical arrival times, in fractions: what each rate must answer."""

    arrival_s: dict[tuple[str, str | None, str], Fraction] = field(default_factory=dict)

    def levels(self, descriptor: Descriptor, charge: Charge) -> list[tuple[tuple[str, str | None, str], int, int]]:
        limits = descriptor.limits
        pairs = (("r", limits.requests_per_minute, charge.requests), ("t", limits.tokens_per_minute, charge.tokens))
        return [((descriptor.tenant, descriptor.model, k), limit, n) for k, limit, n in pairs if limit is not None]

    def ahead(self, key: tuple[str, str | None, str], now: Fraction) -> Fraction:
        return max(Fraction(0), self.arrival_s.get(key, Fraction(0)) - now)

    def fits(self, descriptor: Descriptor, charge: Charge, now: Fraction) -> bool:
        return all(
            self.ahead(key, now) + Fraction(60 * min(n, limit), limit) <= 60
            for key, limit, n in self.levels(descriptor, charge)
        )

    def add(self, descriptor: Descriptor, charge: Charge, now: Fraction, sign: int = 1) -> None:
        for key, limit, n in self.levels(descriptor, charge):
            self.arrival_s[key] = now + max(Fraction(0), self.ahead(key, now) + sign * Fraction(60 * n, limit))

    def settle(self, descriptor: Descriptor, old: Charge, new: Charge, now: Fraction) -> None:
        for (key, limit, before), (_, _, after) in zip(
            self.levels(descriptor, old), self.levels(descriptor, new), strict=True
        ):
            self.arrival_s[key] = now + max(Fraction(0), self.ahead(key, now) + Fraction(60 * (after - before), limit))


LEASE_S = 5


class Operations:
    """Reserves, settles, cancels, retries and crashes at random, and knows what must come of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.ledger, self.schedule = rng, Ledger(lease_s=LEASE_S), VirtualSchedule()
        self.now_ms = 1_700_000_000_000
        self.open: dict[str, tuple[Reservation, int]] = {}
        self.done: list[Reservation] = []
        self.granted = self.refused = self.lapsed = 0
        self.number = 0

    @property
    def now(self) -> float:
        return self.now_ms / 1000

    @property
    def exactly(self) -> Fraction:
        return Fraction(self.now_ms, 1000)

    def step(self) -> None:
        self.now_ms += self.rng.choice((0, 0, 1, 7, 300, 900))
        self.lapse()
        operations = (self.reserve, self.reserve, self.settle, self.cancel, self.retry, self.again, self.renew)
        self.rng.choice(operations)()

    def lapse(self) -> None:
        for name, (reservation, lapses_ms) in sorted(self.open.items(), key=lambda item: item[1][1]):
            if lapses_ms <= self.now_ms:
                self.lapsed += 1
                del self.open[name]
                for descriptor in reservation.descriptors:
                    self.schedule.add(descriptor, reservation.charge, self.exactly, -1)

    def reserve(self) -> None:
        self.number += 1
        charge = Charge(requests=1, tokens=self.rng.choice((0, 1, 200, 1500, 9000)))
        asked = Reservation(str(self.number), self.rng.choice(ASKED_OF), charge)
        fits = all(self.schedule.fits(descriptor, charge, self.exactly) for descriptor in asked.descriptors)
        answer = self.ledger.reserve(asked, now=self.now)
        assert isinstance(answer, Reservation) is fits
        self.granted += fits
        self.refused += not fits
        if fits:
            self.open[asked.id] = (asked, self.now_ms + LEASE_S * 1000)
            for descriptor in asked.descriptors:
                self.schedule.add(descriptor, charge, self.exactly)

    def one_open(self) -> Reservation | None:
        return self.open[self.rng.choice(sorted(self.open))][0] if self.open else None

    def settle(self, share: float | None = None) -> None:
        if reservation := self.one_open():
            used = self.rng.random() * 2 if share is None else share
            charge = Charge(requests=1, tokens=int(reservation.charge.tokens * used))
            assert self.ledger.settle(reservation, charge, now=self.now) is Settlement.SETTLED
            for descriptor in reservation.descriptors:
                self.schedule.settle(descriptor, reservation.charge, charge, self.exactly)
            del self.open[reservation.id]
            self.done.append(reservation)

    def cancel(self) -> None:
        self.settle(share=self.rng.choice((0.0, 0.3)))

    def retry(self) -> None:
        if reservation := self.one_open():
            assert isinstance(self.ledger.reserve(reservation, now=self.now), Reservation)
            self.open[reservation.id] = (reservation, self.now_ms + LEASE_S * 1000)

    def again(self) -> None:
        if self.done:
            reservation = self.done[-1]
            assert self.ledger.settle(reservation, Charge(5, 5, 5), now=self.now) is Settlement.AGAIN

    def renew(self) -> None:
        if reservation := self.one_open():
            self.ledger.renew([reservation.id], now=self.now)
            self.open[reservation.id] = (reservation, self.now_ms + LEASE_S * 1000)

    def check(self) -> None:
        self.ledger.check()
        for descriptor in LIMITED:
            standing = self.ledger.standing([descriptor], now=self.now)
            for key, limit, _ in self.schedule.levels(descriptor, Charge()):
                allowance = standing.requests if key[2] == "r" else standing.tokens
                assert allowance is not None
                free = limit - self.schedule.ahead(key, self.exactly) * limit / 60
                assert allowance.remaining == max(0, int(free // 1))


@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_operations_balance_to_the_unit(seed: int) -> None:
    run = Operations(random.Random(seed))
    for number in range(10_000):
        run.step()
        if number % 20 == 0:
            run.check()
    run.check()
    assert min(run.granted, run.refused, run.lapsed) > 20, "the run must see everything"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90), st.integers(0, 90), st.integers(0, 40_000))))
@settings(deadline=None, max_examples=80)
def test_any_order_of_reserving_and_settling_balances(steps: list[tuple[int, int, int, int]]) -> None:
    ledger, now_ms = Ledger(lease_s=30), 0
    for name, reserved, used, pause_ms in steps:
        now_ms += pause_ms
        asked = a_reservation(str(name), TOKENS, COST, tokens=reserved, cost=reserved)
        ledger.reserve(asked, now=now_ms / 1000)
        ledger.check()
        if used % 2:
            ledger.settle(asked, Charge(tokens=used, cost=used), now=now_ms / 1000)
            ledger.check()
