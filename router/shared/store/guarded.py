"""Quotas that hold even if the shared store is slow, unreachable, full or wrong."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from policies.errors import Overloaded
from policies.quota.budget import Charge, Descriptor, Refused, Reservation, Standing, meters, share
from policies.quota.ledger import Ledger, milliseconds
from router.shared.store.base import Fault, SharedStore, StoreFailed
from router.shared.store.calls import Calls
from router.shared.store.debts import Debt, DebtFile, LeftDebts
from router.supervise import supervise

PATIENCE_S = 1.0
"""Longest time that the start waits for the shared store's first answer, closing waits for settlements, and a request
waits for its turn: a store slower than its requests arrive would keep each of them waiting longer."""

AT_ONCE = 4
"""Most reservations that ask the shared store at the same time: a burst would make it look slow. More would not be
faster, since a router and Redis are one thread each, and opening a connection costs several round trips."""

SETTLED_TOGETHER = 32
"""Most settlements in one round trip. One by one, a router would settle fewer requests in a second than it admits."""

_MOST_PAID = 1000
"""Settlements that are paid and still in the file: none counts twice, and to take each of them out would cost more."""

_WRITE_AGAIN_S = 1.0
"""Time until a file is written again that could not be: all that is owed is written then."""

_HOUR_MS = 3_600_000

_log = logging.getLogger("pointsman.quotas")


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """Deadlines and bounds for the shared store.

    `replicas` share the limits equally while it is away. `strict` then rejects requests rather than exceed a limit.
    Of more than `most_owed` settlements, those of one descriptor and hour are added up.
    """

    replicas: int = 1
    strict: bool = False
    deadline_s: float = 0.1
    first_backoff_s: float = 0.1
    most_backoff_s: float = 5.0
    renew_every_s: float = 20.0
    most_owed: int = 10_000


class _Owed(msgspec.Struct, eq=False):
    """A settlement that the shared store has not confirmed, by its `number` in its ledger."""

    reservation: Reservation
    charge: Charge
    number: int


class GuardedStore:
    """Asks `shared` within a deadline; while it is away, grants this router's own share of the limits.

    After one failure the shared store counts as away: no request waits for it until a background task has reached it
    again and sent the owed settlements and what was granted meanwhile. The local ledger is charged for everything that
    this router admits, and learns from every answer what all routers used, so that its share is up to date when it is
    needed. Settlements always go through the background task: no request waits for them, and a cancelled one settles
    all the same. Until they are confirmed they lie in the `file` as well, before `settle` returns; a router that starts
    later, or comes back, pays what a killed one has left there.

    The limits are divided by the number of `replicas` in the options or, if that is more, by that of the `routers` that
    were known when the shared store last answered.

    `on_event` gets `quota_store_<fault>`, `quota_store_back`, `quota_settlement_dropped`, `quota_debts_unwritten` (the
    file cannot be written) and `quota_debts_taken_over`. `clock` is Unix time.
    """

    def __init__(
        self,
        shared: SharedStore,
        *,
        clock: Callable[[], float],
        options: GuardOptions | None = None,
        on_event: Callable[[str], None] = lambda _: None,
        routers: Callable[[], int] = lambda: 1,
        file: DebtFile | None = None,
    ) -> None:
        self._shared, self._clock, self._on_event = shared, clock, on_event
        self._file, self._unwritten_until = file, 0.0
        self._writer, self._numbers = uuid.uuid4().hex, dict[str, int]()
        self._must_take_over = file is not None
        self._options = options or GuardOptions()
        self._count_routers, self._routers = routers, self._options.replicas
        self._local = Ledger()
        self._calls = Calls(self._options.deadline_s)
        self._open: dict[str, Reservation] = {}
        self._owed: deque[_Owed] = deque()
        # what requests of open reservations have used so far, by the reservation's id
        self._so_far: dict[str, Debt] = {}
        self._has_work = asyncio.Event()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._backoff_s = self._options.first_backoff_s
        self._renew_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_suspect = False
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
        if self._must_take_over:
            self._has_work.set()
        self._task = asyncio.create_task(supervise("quota store", self._look_after))

    async def close(self) -> None:
        """Send the owed settlements, if the shared store answers, and close it."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._calls.end, within_s=PATIENCE_S)
            stack.push_async_callback(self._shared.close)
            stack.callback(self._leave_debts)
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
            answer = await self._calls.run(self._shared.reserve, asked)
        except StoreFailed as failure:
            self._lost(failure.fault)
            return self._after_failure(asked)
        except asyncio.CancelledError:
            self._owe(asked, Charge())
            raise
        self._backoff_s = self._options.first_backoff_s
        self._remember(asked, answer)
        return answer

    async def advance(self, asked: Reservation) -> Reservation | None:
        """What is `asked` in advance; None if the shared store has not far more room than that, or is away."""
        if self.is_away:
            return None
        try:
            answer = await self.reserve(asked)
        except Overloaded:
            return None
        if isinstance(answer, Refused):
            return None
        if answer.is_local:
            self.settle(answer, Charge())
            return None
        return answer

    async def grant(self, reservation: Reservation) -> None:
        """Have `reservation` reserved, which running requests have already: now, or once the shared store is back."""
        is_local = self.is_away
        if not is_local:
            try:
                await self._calls.run(self._shared.grant, reservation)
            except StoreFailed as failure:
                self._lost(failure.fault)
                is_local = True
        self._local.grant(self._own(reservation), now=self._clock())
        self._open[reservation.id] = replace(reservation, is_local=is_local)

    def note(self, reservation: Reservation, used: Charge) -> None:
        """Have on the disk what requests of `reservation` have used in all, of which others still run: it is settled
        later, or by the router that takes over what this one has left."""
        if self._file is not None:
            # not one of the numbers, which come nearly in order: behind it lies the debt that is sent, or none was
            debt = Debt.of(reservation, used, f"{self._writer}/{reservation.id}", 1)
            self._so_far[reservation.id] = debt
            self._keep(self._file, debt)

    def settle(self, reservation: Reservation, charge: Charge) -> None:
        """See QuotaStore. The background task sends it now, or when the store is back."""
        if not meters(reservation.descriptors):
            return
        self._open.pop(reservation.id, None)
        self._so_far.pop(reservation.id, None)
        self._local.settle(self._own(reservation), charge, now=self._clock())
        self._owe(reservation, charge)

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        """Nothing to do: the background task renews open reservations until they are settled."""

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        """See QuotaStore; of this router's share while the shared store is away."""
        if not self.is_away:
            try:
                return await self._calls.run(self._shared.standing, descriptors)
            except StoreFailed as failure:
                self._lost(failure.fault)
        return self._local.standing(self._shares(descriptors), now=self._clock())

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]:
        """See QuotaStore. Raises StoreFailed while the shared store is away: this router knows its own share only."""
        if self.is_away:
            raise StoreFailed(Fault.GONE, "the shared store is away")
        try:
            return await self._calls.run(self._shared.levels, descriptors)
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
        now = self._clock()
        answer = self._local.reserve(self._own(asked), now=now)
        # a share that is near its end says little about the budget
        standing = replace(answer.standing, near=())
        if isinstance(answer, Refused):
            return replace(answer, standing=standing, is_local=True)
        granted = replace(
            answer, descriptors=asked.descriptors, standing=standing, is_local=True, began_ms=milliseconds(now)
        )
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
            self._add_up()
        ledger = reservation.descriptors[0].ledger
        self._numbers[ledger] = number = self._numbers.get(ledger, 0) + 1
        owed = _Owed(reservation, charge, number)
        self._owed.append(owed)
        if self._file is not None:
            self._keep(self._file, self._debt(owed))
        self._has_work.set()

    def _add_up(self) -> None:
        """Make room: what was owed by one descriptor in one hour, and was never sent, becomes one settlement."""
        owed, groups = list(self._owed), dict[Any, _Owed]()
        # those that are sent next may have arrived
        kept = owed[:SETTLED_TOGETHER]
        for each in owed[SETTLED_TOGETHER:]:
            hour = each.reservation.began_ms // _HOUR_MS
            key = hour, tuple([descriptor.id for descriptor in each.reservation.descriptors])
            if (sum_of := groups.get(key)) is None:
                groups[key] = _Owed(each.reservation, each.charge, each.number)
            else:
                sum_of.reservation, sum_of.number = each.reservation, each.number
                sum_of.charge = sum_of.charge.and_(each.charge)
        kept += groups.values()
        # a tenth of the room, so that this is not done for each one
        for _ in range(max(0, len(kept) - max(1, self._options.most_owed * 9 // 10))):
            self._on_event("quota_settlement_dropped")
        self._owed = deque(kept[-max(1, self._options.most_owed * 9 // 10) :])
        if self._file is not None:
            self._keep_anew(self._file)

    def _keep(self, file: DebtFile, debt: Debt) -> None:
        """Have `debt` on the disk."""
        if self._unwritten_until:
            # of what could not be written all is written, soon
            if _now() >= self._unwritten_until:
                self._keep_anew(file)
            return
        try:
            file.add((debt,))
        except OSError as error:
            self._note_unwritten(file, error)

    def _keep_anew(self, file: DebtFile) -> None:
        """Have all that is owed on the disk, and nothing else."""
        try:
            file.replace([*self._so_far.values(), *map(self._debt, self._owed)])
            self._unwritten_until = 0.0
        except OSError as error:
            self._note_unwritten(file, error)

    def _note_unwritten(self, file: DebtFile, error: OSError) -> None:
        if not self._unwritten_until:
            _log.warning("what is owed to the store of quotas cannot be written: %r: %s", file, error)
        self._unwritten_until = _now() + _WRITE_AGAIN_S
        self._on_event("quota_debts_unwritten")

    def _leave_debts(self) -> None:
        """Leave what is not paid to the next router."""
        self._forget_paid()
        if self._file is not None:
            if self._unwritten_until:
                self._keep_anew(self._file)
            self._file.close()

    def _forget_paid(self) -> None:
        """Take what was paid out of the file."""
        file = self._file
        if file is None:
            return
        kept = len(self._owed) + len(self._so_far)
        if not kept:
            self._unwritten_until = 0.0
            with suppress(OSError):
                file.clear()
        elif file.count >= _MOST_PAID + 2 * kept:
            # where some are owed at each moment it would grow for ever
            self._keep_anew(file)

    def _debt(self, owed: _Owed) -> Debt:
        return Debt.of(owed.reservation, owed.charge, self._writer, owed.number)

    def _lost(self, fault: Fault) -> None:
        # one late answer is that of a busy machine: connections are given up if the next call is late as well
        self._is_suspect = self.is_away or fault is not Fault.SLOW
        self.is_away = True
        self._on_event(f"quota_store_{fault}")
        self._has_work.set()

    async def _look_after(self) -> None:
        while True:
            await self._until_needed()
            try:
                if self.is_away:
                    if self._is_suspect:
                        await self._calls.run(self._shared.hang_up)
                    await self._greet()
                if self.is_away or _now() >= self._renew_at:
                    await self._renew_open()
                await self._pay()
                if self.is_away:
                    await self._come_back()
                    self._must_take_over = self._file is not None
                self._forget_paid()
                if self._must_take_over:
                    await self._take_over()
            except StoreFailed as failure:
                self._lost(failure.fault)

    async def _greet(self) -> None:
        """Have the shared store answer on as many connections as are used at once. It takes several round trips to
        open one, with TLS or to find the primary, and no request waits for it."""
        await asyncio.gather(*(self._calls.run(self._shared.renew, (), within_s=PATIENCE_S) for _ in range(AT_ONCE)))

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
            await self._calls.run(self._shared.renew, reservations)
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
        await self._calls.run(self._shared.grant, reservation)
        if reservation.id in self._open:
            self._open[reservation.id] = replace(reservation, is_local=False)

    async def _pay(self) -> None:
        """Send the settlements owed now, oldest first; later ones wait, so that renewing gets its turn."""
        for _ in range(-(-len(self._owed) // SETTLED_TOGETHER)):
            batch = list(itertools.islice(self._owed, SETTLED_TOGETHER))
            if not batch:
                return
            await self._calls.run(self._shared.settle_all, [self._debt(owed) for owed in batch])
            # remove them only once they arrived; meanwhile the oldest may have been dropped
            arrived = {id(owed) for owed in batch}
            while self._owed and id(self._owed[0]) in arrived:
                self._owed.popleft()

    async def _take_over(self) -> None:
        """Pay what routers owed that were killed, and left their files in the same folder."""
        assert self._file is not None
        for orphan in await asyncio.to_thread(self._left_behind, self._file):
            try:
                for at in range(0, len(orphan.debts), SETTLED_TOGETHER):
                    await self._calls.run(self._shared.settle_all, orphan.debts[at : at + SETTLED_TOGETHER])
                orphan.remove()
                self._on_event("quota_debts_taken_over")
            finally:
                orphan.release()
        self._must_take_over = False

    def _left_behind(self, file: DebtFile) -> list[LeftDebts]:
        try:
            return list(file.left_behind())
        except OSError as error:
            _log.warning("what killed routers owed to the store of quotas cannot be read: %s", error)
            return []


def _now() -> float:
    return asyncio.get_running_loop().time()
