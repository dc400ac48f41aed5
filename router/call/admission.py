"""The way in: doors that can be closed so that the router empties, and permits.

A permit is what a call reserves of its tenant's quota, at the highest price that may hold, and the right to run it,
which is settled once, whatever happens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import msgspec

from policies.errors import CutOff, ExpectedError, QuotaExceeded, Unavailable
from policies.nouns import Outcome, Usage
from policies.quota.budget import (
    NEAR_PERCENT,
    ONE_REQUEST,
    Charge,
    Descriptor,
    Near,
    Refused,
    Reservation,
    Standing,
    charge_of,
    meters,
)
from policies.quota.prices import Prices
from router.call.outcome import outcome_of
from router.shared.store.base import QuotaStore

_RETRY_AFTER_S = 1.0

LOOK_S = 0.5
"""After this a budget is looked at that a request has brought near its end."""

_ANSWERS = (Reservation, Refused)
"""Of a store that answers at once; others are to be awaited."""

Tell = Callable[[Standing], None]


class Doors:
    """Open until `close()`. A call is inside from entering its Stay until that is left, however it ends."""

    def __init__(self) -> None:
        self.open = True
        self._inside: set[Stay] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"<Doors {'open' if self.open else 'closed'}, {self.inside} inside>"

    @property
    def inside(self) -> int:
        """How many calls are inside."""
        return len(self._inside)

    def close(self) -> None:
        """Let no more calls in; those inside stay."""
        self.open = False

    def turn_out(self) -> None:
        """End all calls that are inside now."""
        for stay in self._inside:
            stay.end()

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until no call is inside, at most `timeout_s`; returns whether none is."""
        if self.inside:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()
        return not self.inside

    def check(self) -> None:
        """Assert that the counts agree; may be called at any time."""
        assert self._empty.is_set() == (self.inside == 0), f"{self!r}: the event does not fit the count"


class Stay(msgspec.Struct, eq=False):
    """One call inside `doors`, as a context manager: entering it raises Unavailable once the doors are closed, leaving
    it CutOff if all were turned out. `end` cancels its task, as asyncio.timeout does it.
    """

    doors: Doors
    _is_ended: bool = False
    _was_cancelling: int = 0
    _task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        task = self._task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        self._was_cancelling, doors = task.cancelling(), self.doors
        if not doors.open:
            hint = "try again: another replica may take it"
            raise Unavailable("the router is shutting down", hint=hint, retry_after_s=_RETRY_AFTER_S)
        if not doors._inside:
            doors._empty.clear()
        doors._inside.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        doors = self.doors
        doors._inside.discard(self)
        if not doors._inside:
            doors._empty.set()
        if not self._is_ended or self._task is None:
            return
        # the client may have left in the same moment
        if self._task.uncancel() <= self._was_cancelling and isinstance(error, asyncio.CancelledError):
            hint = "ask again: another replica may answer"
            message = "the router shut down before this answer ended"
            raise CutOff(message, hint=hint, retry_after_s=_RETRY_AFTER_S) from error

    def end(self) -> None:
        """End the call, once."""
        if not self._is_ended and self._task is not None:
            self._is_ended = True
            self._task.cancel()


class Admission:
    """Decides which calls may run now. Holds the open permits, by descriptor; the store limits use over time.

    `on_near` gets the budgets of a call that are near their end by what is settled, at once or `look_s` later.
    """

    def __init__(
        self,
        store: QuotaStore,
        *,
        on_near: Callable[[Sequence[Near]], None] = lambda _: None,
        look_s: float = LOOK_S,
    ) -> None:
        self.store, self._on_near, self._look_s = store, on_near, look_s
        # tenant -> when its budgets are looked at
        self._looks: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
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

    def crowd(self) -> tuple[int, int]:
        """How many permits are open, and of how many tenants."""
        return len(self._open), sum(not scope for _, scope in self._running)

    def is_idle(self) -> bool:
        """Is no permit open?"""
        return not self._open

    def check(self) -> None:
        """Assert that the counts agree with the open permits; with none open, all counts are zero."""
        counted = Counter(descriptor.id for permit in self._open for descriptor in permit.asked.descriptors)
        assert counted == self._running, f"{self!r}: counts differ from permits {counted}"
        assert all(permit.outcome is None for permit in self._open), f"{self!r}: a settled permit is still open"

    def admit(self, asked: Reservation, tell: Tell = lambda _: None) -> Permit | Coroutine[Any, Any, Permit]:
        """A Permit for what is `asked`, open from now on, at once or after what is to be awaited.

        `tell` hears what is left to its tenant, also before a refusal. Raises QuotaExceeded, and then nothing is
        reserved.
        """
        running = self._running
        for descriptor in asked.descriptors:
            most = descriptor.limits.concurrent
            if most is not None and (count := running.get(descriptor.id, 0)) >= most:
                raise QuotaExceeded(
                    f"{descriptor} has {count} requests running, which is its limit",
                    hint="wait for one to finish",
                    retry_after_s=_RETRY_AFTER_S,
                )
        # counted before the store is asked: others come in meanwhile
        permit, is_metered = Permit(self, asked), False
        self._open.add(permit)
        for descriptor in asked.descriptors:
            running[descriptor.id] = running.get(descriptor.id, 0) + 1
            is_metered = is_metered or bool(descriptor.meters)
        if not is_metered:
            return permit
        try:
            answer = self.store.reserve(asked)
            if isinstance(answer, _ANSWERS):
                return self._answered(permit, answer, tell)
        except BaseException:
            self.close(permit)
            raise
        return self._awaited(permit, answer, tell)

    async def _awaited(self, permit: Permit, answer: Coroutine[Any, Any, Reservation | Refused], tell: Tell) -> Permit:
        try:
            return self._answered(permit, await answer, tell)
        except BaseException:
            self.close(permit)
            raise

    def _answered(self, permit: Permit, answer: Reservation | Refused, tell: Tell) -> Permit:
        """`permit` with the store's `answer`. Raises QuotaExceeded."""
        standing = answer.standing
        if standing.near:
            self._on_near(standing.near)
        tell(standing)
        if isinstance(answer, Refused):
            raise answer.error()
        permit.reservation = answer
        return permit

    def give_back(self, reservation: Reservation, charge: Charge) -> None:
        """What was reserved is settled as `charge`. Where that brings a budget near its end, `on_near` hears of it
        soon, although no further request may come.
        """
        if not (reservation.charge.cost or charge.cost):
            return
        more = charge.cost - reservation.charge.cost
        for meter, level in zip(meters(reservation.descriptors), reservation.levels, strict=False):
            if meter.period is not None and (level + more) * 100 >= meter.capacity * NEAR_PERCENT:
                self._look_soon(reservation.descriptors)
                return

    def _look_soon(self, descriptors: tuple[Descriptor, ...]) -> None:
        tenant = descriptors[0].tenant
        if tenant in self._looks:
            return

        async def look() -> None:
            with suppress(ExpectedError):
                if near := (await self.store.standing(descriptors)).near:
                    self._on_near(near)

        def begin() -> None:
            del self._looks[tenant]
            task = loop.create_task(look(), name=f"budgets of {tenant}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        # what is settled takes a moment to reach a store, and many requests may end together
        loop = asyncio.get_running_loop()
        self._looks[tenant] = loop.call_later(self._look_s, begin)

    async def end(self) -> None:
        """Look at no budgets any more; those looks that have begun end."""
        for timer in self._looks.values():
            timer.cancel()
        self._looks.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self, permit: Permit) -> None:
        """`permit` is open no more. Called once."""
        running = self._running
        self._open.discard(permit)
        for descriptor in permit.asked.descriptors:
            if left := running[descriptor.id] - 1:
                running[descriptor.id] = left
            else:
                del running[descriptor.id]


class Permit(msgspec.Struct, eq=False):
    """The right to run what was `asked`; at the end it is settled, once, with the Outcome and the `usage` so far. A
    context manager that is left does so.

    `reservation` is what was taken for it, None where its tenant has no limits. `charge` is what it used, as its tenant
    pays for it; a call without an answer counts as one request and no tokens.
    """

    admission: Admission
    asked: Reservation
    reservation: Reservation | None = None
    usage: Usage | None = None
    charge: Charge = ONE_REQUEST
    outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"<Permit of {self.asked.descriptors[0].tenant}: {self.outcome or 'open'}, {self.usage}>"

    def spend(self, usage: Usage, prices: Prices) -> int:
        """Charge `usage` at `prices` on top of what was charged before; the cost of it, in thousandths of a unit."""
        charge, before = charge_of(usage, prices), self.charge
        self.charge = Charge(1, before.tokens + charge.tokens, before.cost + charge.cost)
        self.usage = usage if self.usage is None else self.usage.and_(usage)
        return charge.cost

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle(error)

    def settle(self, error: BaseException | None) -> None:
        """Close it, after a call that ended with `error`, or without one, and say what it really used."""
        assert self.outcome is None, f"{self!r} is settled twice"
        admission = self.admission
        self.outcome = Outcome.FINISHED if error is None else outcome_of(error)
        admission.close(self)
        admission.settled[self.outcome] += 1
        if self.reservation is not None:
            admission.store.settle(self.reservation, self.charge)
            admission.give_back(self.reservation, self.charge)
