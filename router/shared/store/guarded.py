"""Quotas that hold even if the shared store is slow, unreachable, full or wrong."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from msgspec.structs import replace

from policies.errors import Overloaded
from policies.quota.budget import Charge, Descriptor, Refused, Reservation, Standing, meters, share
from policies.quota.ledger import KEPT_S, Ledger
from router.shared.store.base import Fault, SharedStore, StoreFailed
from router.shared.store.calls import Calls
from router.supervise import supervise

PATIENCE_S = 1.0
"""Longest time that the start waits for the shared store's first answer, closing waits for settlements, and a request
waits for its turn: a store slower than its requests arrive would keep each of them waiting longer."""

AT_ONCE = 4
"""Most reservations that ask the shared store at the same time: a burst would make it look slow. More would not be
faster, since a router and Redis are one thread each, and opening a connection costs several round trips."""


SETTLED_TOGETHER = 32
"""Most settlements in one round trip. One by one, a router would settle fewer requests in a second than it admits."""


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """Deadlines and bounds for the shared store.

    `replicas` share the limits equally while it is away. `strict` then rejects requests rather than exceed a limit.
    A failed settlement is retried for `retry_for_s`: later the store may have forgotten that it arrived, and would
    charge it twice.
    """

    replicas: int = 1
    strict: bool = False
    deadline_s: float = 0.1
    first_backoff_s: float = 0.1
    most_backoff_s: float = 5.0
    renew_every_s: float = 20.0
    most_owed: int = 10_000
    retry_for_s: float = KEPT_S / 2


@dataclass(slots=True)
class _Owed:
    """A settlement that the shared store has not confirmed. `tried_at` is when it was first sent."""

    reservation: Reservation
    charge: Charge
    tried_at: float | None = None


class GuardedStore:
    """Asks `shared` within a deadline; while it is away, grants this router's own share of the limits.

    After one failure the shared store counts as away: no request waits for it until a background task has reached it
    again and sent the owed settlements and what was granted meanwhile. The local ledger is charged for everything that
    this router admits, and learns from every answer what all routers used, so that its share is up to date when it is
    needed. Settlements always go through the background task: no request waits for them, and a cancelled one settles
    all the same.

    The limits are divided by the number of `replicas` in the options or, if that is more, by that of the `routers` that
    were known when the shared store last answered.

    `on_event` gets `quota_store_<fault>`, `quota_store_back` and `quota_settlement_dropped`. `clock` is Unix time.
    """

    def __init__(
        self,
        shared: SharedStore,
        *,
        clock: Callable[[], float],
        options: GuardOptions | None = None,
        on_event: Callable[[str], None] = lambda _: None,
        routers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._shared, self._clock, self._on_event = shared, clock, on_event
        self._options = options or GuardOptions()
        self._count_routers, self._routers = routers, self._options.replicas
        self._local = Ledger()
        self._calls = Calls(self._options.deadline_s)
        self._open: dict[str, Reservation] = {}
        self._owed: deque[_Owed] = deque()
        self._has_work = asyncio.Event()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._backoff_s = self._options.first_backoff_s
        self._renew_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self.is_away = False
        """Whether only the local share is asked. For metrics."""

    def __repr__(self) -> str:
        where = "local share" if self.is_away else "shared"
        return f"<GuardedStore {where}, {len(self._open)} open, {len(self._owed)} owed, {self._shared!r}>"

    @property
    def owed(self) -> int:
        """Number of settlements that the shared store has not confirmed. For metrics."""
        return len(self._owed)

    async def start(self) -> None:
        """Start the background task, once the shared store answers on as many connections as are used at once. A router
        that began with its own share while others had used all of the limit would exceed it."""
        try:
            await self._greet()
        except StoreFailed as failure:
            self._lost(failure.fault)
        self._renew_at = _now() + self._options.renew_every_s
        self._task = asyncio.create_task(supervise("quota store", self._look_after))

    async def close(self) -> None:
        """Send the owed settlements, if the shared store answers, and close it."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._calls.end, within_s=PATIENCE_S)
            stack.push_async_callback(self._shared.close)
            if self._task is not None:
                self._task.cancel()
                with suppress(asyncio.CancelledError):
                    await self._task
            with suppress(StoreFailed, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._pay()

    async def reserve(self, asked: Reservation) -> Reservation | Refused:
        """See QuotaStore; never raises StoreFailed. Raises Overloaded if it is strict and the shared store is away."""
        if not meters(asked.descriptors):
            return asked
        # waiting for a turn is a delay of this router, at first no sign of a slow store
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._turns.acquire()
        except TimeoutError:
            if not self.is_away:
                self._lost(Fault.SLOW)
            return self._alone(asked)
        try:
            return await self._together(asked)
        finally:
            self._turns.release()

    async def _together(self, asked: Reservation) -> Reservation | Refused:
        """The shared store's answer, or this router's share while it is away."""
        if self.is_away:
            return self._alone(asked)
        try:
            answer = await self._calls.run(self._shared.reserve(asked))
        except StoreFailed as failure:
            self._lost(failure.fault)
            return self._after_failure(asked)
        except asyncio.CancelledError:
            self._owe(asked, Charge())
            raise
        self._backoff_s = self._options.first_backoff_s
        self._remember(asked, answer)
        return answer

    def settle(self, reservation: Reservation, charge: Charge) -> None:
        """See QuotaStore. The background task sends it now, or when the store is back."""
        if not meters(reservation.descriptors):
            return
        self._open.pop(reservation.id, None)
        self._local.settle(self._own(reservation), charge, now=self._clock())
        self._owe(reservation, charge)

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        """Nothing to do: the background task renews open reservations until they are settled."""

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        """See QuotaStore; of this router's share while the shared store is away."""
        if not self.is_away:
            try:
                return await self._calls.run(self._shared.standing(descriptors))
            except StoreFailed as failure:
                self._lost(failure.fault)
        return self._local.standing(self._shares(descriptors), now=self._clock())

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]:
        """See QuotaStore. Raises StoreFailed while the shared store is away: this router knows its own share only."""
        if self.is_away:
            raise StoreFailed(Fault.GONE, "the shared store is away")
        try:
            return await self._calls.run(self._shared.levels(descriptors))
        except StoreFailed as failure:
            self._lost(failure.fault)
            raise

    def check(self) -> None:
        """Assert that the local ledger balances and that nothing is buffered without bound."""
        self._local.check()
        assert len(self._owed) <= self._options.most_owed, f"{self!r} owes too much"

    def _remember(self, asked: Reservation, answer: Reservation | Refused) -> None:
        """Charge the local ledger as if it had been asked, and for this router's share of the others' usage."""
        self._routers = max(self._options.replicas, self._count_routers())
        own, now = self._own(asked), self._clock()
        if isinstance(answer, Reservation):
            self._local.grant(own, now=now)
            self._open[answer.id] = answer
        levels = [-(-level // self._routers) for level in answer.levels]
        self._local.learn(own.descriptors, levels, now=now)

    def _alone(self, asked: Reservation) -> Reservation | Refused:
        if self._options.strict:
            hint = "quotas are strict, so no request is admitted meanwhile"
            raise Overloaded("the store of quotas is away", hint=hint, retry_after_s=self._options.most_backoff_s)
        answer = self._local.reserve(self._own(asked), now=self._clock())
        # a share that is near its end says little about the budget
        standing = replace(answer.standing, near=())
        if isinstance(answer, Refused):
            return replace(answer, standing=standing, is_local=True)
        granted = replace(answer, descriptors=asked.descriptors, standing=standing, is_local=True)
        self._open[asked.id] = granted
        return granted

    def _after_failure(self, asked: Reservation) -> Reservation | Refused:
        """Ask the local share. The shared store may have reserved too: that is undone if the request does not run."""
        answer: Reservation | Refused | None = None
        try:
            answer = self._alone(asked)
            return answer
        finally:
            if not isinstance(answer, Reservation):
                self._owe(asked, Charge())

    def _own(self, reservation: Reservation) -> Reservation:
        return replace(reservation, descriptors=self._shares(reservation.descriptors))

    def _shares(self, descriptors: Sequence[Descriptor]) -> tuple[Descriptor, ...]:
        return tuple(share(descriptor, self._routers) for descriptor in descriptors)

    def _owe(self, reservation: Reservation, charge: Charge) -> None:
        if len(self._owed) >= self._options.most_owed:
            self._owed.popleft()
            self._on_event("quota_settlement_dropped")
        self._owed.append(_Owed(reservation, charge))
        self._has_work.set()

    def _lost(self, fault: Fault) -> None:
        self.is_away = True
        self._on_event(f"quota_store_{fault}")
        self._has_work.set()

    async def _look_after(self) -> None:
        while True:
            await self._until_needed()
            try:
                if self.is_away:
                    await self._calls.run(self._shared.hang_up())
                    await self._greet()
                if self.is_away or _now() >= self._renew_at:
                    await self._renew_open()
                await self._pay()
                if self.is_away:
                    await self._come_back()
            except StoreFailed as failure:
                self._lost(failure.fault)

    async def _greet(self) -> None:
        """Have the shared store answer on as many connections as are used at once. It takes several round trips to
        open one, with TLS or to find out who is the primary, and no request waits for it."""
        await asyncio.gather(*(self._calls.run(self._shared.renew(()), within_s=PATIENCE_S) for _ in range(AT_ONCE)))

    async def _until_needed(self) -> None:
        """Wait for a settlement or the time to renew; while the store is away, for the time of the next attempt."""
        if self.is_away:
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(self._options.most_backoff_s, 2 * self._backoff_s)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._renew_at):
                await self._has_work.wait()
        self._has_work.clear()

    async def _renew_open(self) -> None:
        by_ledger: dict[str, list[Reservation]] = {}
        for reservation in self._open.values():
            if not reservation.is_local:
                by_ledger.setdefault(reservation.descriptors[0].ledger, []).append(reservation)
        for reservations in by_ledger.values() or ([],):
            await self._calls.run(self._shared.renew(reservations))
        self._renew_at = _now() + self._options.renew_every_s

    async def _come_back(self) -> None:
        """Have the shared store count the running requests that it has not seen, before it admits more beside them."""
        # those that begin meanwhile are fewer than those before them; new ones wait only for the last few
        for _ in range(2):
            await self._report_granted()
        turns = 0
        try:
            for _ in range(AT_ONCE):
                await self._turns.acquire()
                turns += 1
            await self._report_granted()
            self.is_away = False
            self._on_event("quota_store_back")
        finally:
            for _ in range(turns):
                self._turns.release()

    async def _report_granted(self) -> None:
        found = [each for each in self._open.values() if each.is_local]
        for at in range(0, len(found), AT_ONCE):
            await asyncio.gather(*(self._report(reservation) for reservation in found[at : at + AT_ONCE]))

    async def _report(self, reservation: Reservation) -> None:
        await self._calls.run(self._shared.grant(reservation))
        if reservation.id in self._open:
            self._open[reservation.id] = replace(reservation, is_local=False)

    async def _pay(self) -> None:
        """Send the settlements owed now, oldest first; later ones wait, so that renewing gets its turn."""
        for _ in range(-(-len(self._owed) // SETTLED_TOGETHER)):
            batch = self._due()
            if not batch:
                return
            await self._calls.run(self._shared.settle_all([(owed.reservation, owed.charge) for owed in batch]))
            # remove them only once they arrived; meanwhile the oldest may have been dropped
            arrived = {id(owed) for owed in batch}
            while self._owed and id(self._owed[0]) in arrived:
                self._owed.popleft()

    def _due(self) -> list[_Owed]:
        """The next settlements to send. One that the shared store may have forgotten is dropped."""
        now = _now()
        while self._owed and (tried_at := self._owed[0].tried_at) is not None:
            if now - tried_at <= self._options.retry_for_s:
                break
            self._on_event("quota_settlement_dropped")
            self._owed.popleft()
        batch = list(itertools.islice(self._owed, SETTLED_TOGETHER))
        for owed in batch:
            owed.tried_at = owed.tried_at or now
        return batch


def _now() -> float:
    return asyncio.get_running_loop().time()
