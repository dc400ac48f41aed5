"""Permits: the right to run one call. Each reserves its tenant's quota and is settled once, whatever happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from policies.errors import QuotaExceeded
from policies.nouns import Outcome, Usage
from policies.quota.budget import Charge, Descriptor, Near, Refused, Reservation, Standing, charge_of, meters
from policies.quota.prices import Prices
from router.call.outcome import outcome_of
from router.shared.store.base import QuotaStore

_RETRY_AFTER_S = 1.0


Tell = Callable[[Standing], None]


class Claim(msgspec.Struct, frozen=True):
    """What one call asks for: the limits that bind it (its tenant's first), and what to reserve."""

    id: str
    descriptors: tuple[Descriptor, ...]
    charge: Charge

    @property
    def tenant(self) -> str:
        """The tenant that pays."""
        return self.descriptors[0].tenant


class Admission:
    """Decides which calls may run now. Holds the open permits, by descriptor; the store limits use over time.

    `on_near` gets the budgets of a call that are near their end.
    """

    def __init__(self, store: QuotaStore, *, on_near: Callable[[Sequence[Near]], None] = lambda _: None) -> None:
        self.store, self._on_near = store, on_near
        self._open: set[Permit] = set()
        self._running: dict[tuple[str, str], int] = {}
        self.settled: Counter[Outcome] = Counter()

    def __repr__(self) -> str:
        tenants = {tenant: count for (tenant, scope), count in sorted(self._running.items()) if not scope}
        named = ", ".join(f"{tenant}: {count}" for tenant, count in tenants.items())
        return f"<Admission {len(self._open)} open ({named}), {self.settled.total()} settled>"

    def running(self, tenant: str) -> int:
        """How many permits of `tenant` are open."""
        return self._running.get((tenant, ""), 0)

    def is_idle(self) -> bool:
        """Is no permit open?"""
        return not self._open

    def check(self) -> None:
        """Assert that the counts agree with the open permits; with none open, all counts are zero."""
        counted = Counter(descriptor.id for permit in self._open for descriptor in permit.claim.descriptors)
        assert counted == self._running, f"{self!r}: counts differ from permits {counted}"
        assert all(permit.outcome is None for permit in self._open), f"{self!r}: a settled permit is still open"

    def close(self, permit: Permit) -> None:
        """`permit` is open no more. Called by the permit itself, once."""
        running = self._running
        self._open.discard(permit)
        for descriptor in permit.claim.descriptors:
            if left := running[descriptor.id] - 1:
                running[descriptor.id] = left
            else:
                del running[descriptor.id]


class Permit:
    """An async context manager: entered it is open, left it is settled with the Outcome and the `usage` so far.

    `tell` hears what is left to its tenant when it is entered or refused. `reservation` is what was taken for it, None
    where its tenant has no limits. `charge` is what it used, as its tenant pays for it; a call without an answer counts
    as one request and no tokens.
    """

    __slots__ = ("_admission", "_tell", "charge", "claim", "outcome", "reservation", "usage")

    def __init__(self, admission: Admission, claim: Claim, tell: Tell = lambda _: None) -> None:
        self.claim, self._tell = claim, tell
        self.usage: Usage | None = None
        self.charge = Charge(1)
        self.outcome: Outcome | None = None
        self.reservation: Reservation | None = None
        self._admission = admission

    def __repr__(self) -> str:
        return f"<Permit of {self.claim.tenant}: {self.outcome or 'open'}, {self.usage}>"

    def spend(self, usage: Usage, prices: Prices) -> int:
        """Charge `usage` at `prices` on top of what was charged before; the cost of it, in thousandths of a unit."""
        charge, before = charge_of(usage, prices), self.charge
        self.charge = Charge(1, before.tokens + charge.tokens, before.cost + charge.cost)
        self.usage = usage if self.usage is None else self.usage.and_(usage)
        return charge.cost

    async def __aenter__(self) -> Permit:
        """Reserve what it claims. Raises QuotaExceeded, and then nothing was reserved."""
        admission, claim = self._admission, self.claim
        running = admission._running
        for descriptor in claim.descriptors:
            most = descriptor.limits.concurrent
            if most is not None and (count := running.get(descriptor.id, 0)) >= most:
                raise QuotaExceeded(
                    f"{descriptor} has {count} requests running, which is its limit",
                    hint="wait for one to finish",
                    retry_after_s=_RETRY_AFTER_S,
                )
        # counted before the store is asked: others come in meanwhile
        admission._open.add(self)
        for descriptor in claim.descriptors:
            running[descriptor.id] = running.get(descriptor.id, 0) + 1
        if not meters(claim.descriptors):
            return self
        answer: Reservation | Refused | None = None
        try:
            answer = await admission.store.reserve(Reservation(claim.id, claim.descriptors, claim.charge))
        finally:
            if not isinstance(answer, Reservation):
                admission.close(self)
        if answer.standing.near:
            admission._on_near(answer.standing.near)
        self._tell(answer.standing)
        if isinstance(answer, Refused):
            raise answer.error()
        self.reservation = answer
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it and say what it really used."""
        assert self.outcome is None, f"{self!r} is settled twice"
        admission = self._admission
        self.outcome = Outcome.FINISHED if error is None else outcome_of(error)
        admission.close(self)
        admission.settled[self.outcome] += 1
        if self.reservation is not None:
            # no store makes a call wait here, so a call that was cancelled settles like any other
            await admission.store.settle(self.reservation, self.charge)
