"""Reservations in advance: requests of a busy tenant are admitted without asking the shared store for each."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from policies.quota.budget import Charge, Descriptor, Meter, Refused, Reservation, Standing, meters, standing_of
from router.shared.store.guarded import GuardedStore
from router.shared.store.redis import ADVANCE_S

LEAST = 4
"""Fewer requests than this in ADVANCE_S are asked for one by one."""

_LEAD_S = 0.01
"""Before its end the next one is asked for, so that no request waits."""

_TOLD_S = 0.5
"""The longest time until the store is told of requests that ended, where no others begin."""

_PAUSE_S = 0.25
"""How long a store without room for an advance is not asked for another."""

_GRACE_S = 0.03
"""Until what routers give back has arrived."""

_BEFORE_HOUR_S = 1.0
"""Nothing is carried over so soon before an hour ends: a request belongs to the period in which it began."""

_TRIES = 3
"""How often a request waits for an advance before it is asked for by itself."""

_MOST_LINES = 1000
"""Sets of descriptors that are watched at a time: there may be a million end users."""

_HOUR_MS = 3_600_000
_UNBOUND = 1 << 60


class _Sum(msgspec.Struct):
    """A sum of charges, that changes with each request."""

    requests: int = 0
    tokens: int = 0
    cost: int = 0

    def add(self, charge: Charge | _Sum) -> None:
        self.requests += charge.requests
        self.tokens += charge.tokens
        self.cost += charge.cost

    def take(self, charge: Charge | _Sum) -> None:
        self.requests -= charge.requests
        self.tokens -= charge.tokens
        self.cost -= charge.cost

    @property
    def charge(self) -> Charge:
        return Charge(self.requests, self.tokens, self.cost)


class _Account(msgspec.Struct, eq=False):
    """A reservation of the shared store, which requests that began within one hour have in common.

    Its charge is `left` for requests to come, until `until_s` (of the loop's clock), and that of `open` ones, and what
    those had reserved that have ended since it was made; they `used` something else. It is made anew as time passes.
    """

    reservation: Reservation
    metered: tuple[Meter, ...]
    began_s: float
    until_s: float
    left: _Sum
    open: _Sum
    used: _Sum
    running: int = 0
    is_closed: bool = False
    timer: asyncio.TimerHandle | None = None
    bases: tuple[tuple[int, int], ...] = ()
    """Of each meter: its level without what this account holds and has used since, and the settled part of that."""

    def taken(self, asked: Reservation, now_s: float) -> Reservation | None:
        """`asked` if there is room for it."""
        left, charge = self.left, asked.charge
        if (
            now_s >= self.until_s
            or charge.requests > left.requests
            or charge.tokens > left.tokens
            or charge.cost > left.cost
        ):
            return None
        left.take(charge)
        self.open.add(charge)
        self.running += 1
        ms = round((now_s - self.began_s) * 1000)
        began_ms = self.reservation.began_ms + ms
        levels, reserved = self._levels(ms)
        standing = standing_of(self.metered, levels, reserved, now_ms=began_ms)
        return Reservation(asked.id, asked.descriptors, charge, standing, tuple(levels), began_ms=began_ms)

    def is_near_end(self, now_s: float) -> bool:
        """Whether the next one is to be asked for."""
        advance, left = self.reservation.advance, self.left
        return (
            now_s >= self.until_s - _LEAD_S
            or 4 * left.requests < advance.requests
            or 4 * left.tokens < advance.tokens
            or 4 * left.cost < advance.cost
        )

    def _levels(self, after_ms: int) -> tuple[list[int], list[int]]:
        """The level of each meter with what its requests have taken and used, and what open ones have of it."""
        levels, reserved, used, opened = [], [], self.used, self.open
        for meter, (level, settled) in zip(self.metered, self.bases, strict=True):
            counts, unit = meter.counts, meter.unit
            ended = unit * getattr(used, counts)
            fallen = meter.limit * after_ms if meter.period is None else 0
            levels.append(max(0, level + ended + unit * getattr(opened, counts) - fallen))
            reserved.append(0 if meter.period is None else max(0, levels[-1] - settled - ended))
        return levels, reserved

    def ended(self, reserved: Charge, charge: Charge) -> None:
        """One of its requests is charged `charge`."""
        self.open.take(reserved)
        self.used.add(charge)
        self.running -= 1

    def stop(self) -> None:
        """No further request is taken from it."""
        self.until_s, self.left = -math.inf, _Sum()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class _Line(msgspec.Struct, eq=False):
    """Requests of the same `descriptors`, counted since `since_s`."""

    descriptors: tuple[Descriptor, ...]
    since_s: float
    count: int
    sum: _Sum
    account: _Account | None = None
    task: asyncio.Task[None] | None = None
    paused_until_s: float = -math.inf

    def expected(self, now_s: float) -> Charge | None:
        """What comes in ADVANCE_S, as it came lately; None if that is little. Counts anew."""
        elapsed_s, count, total = max(now_s - self.since_s, ADVANCE_S / 4), self.count, self.sum
        number = math.ceil(1.25 * count * ADVANCE_S / elapsed_s)
        if count < LEAST or number < LEAST:
            if elapsed_s >= ADVANCE_S:
                self.since_s, self.count, self.sum = now_s, 0, _Sum()
            return None
        self.since_s, self.count, self.sum = now_s, 0, _Sum()
        return Charge(number, -(-total.tokens * number // count), -(-total.cost * number // count))


class AdvanceStore:
    """`store`, asked for many requests at once where requests of the same descriptors come faster than LEAST in
    ADVANCE_S, and as long as there is far more room than that: then `reserve` answers at once.

    Limits stay exact. What is held in advance is reserved in the shared store, so that no other router can take it. A
    router that is refused while others hold something of that meter asks again once they have given it back. Where a
    limit is near, and where few requests come, each one is asked for.
    """

    def __init__(self, store: GuardedStore, *, now: Callable[[], float] = time.monotonic) -> None:
        self._store, self._now = store, now
        self._lines: dict[tuple[tuple[str, str], ...], _Line] = {}
        self._swept_s = -math.inf
        # each request that was taken from an account, by its id
        self._taken: dict[str, _Account] = {}
        self._accounts: set[_Account] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<AdvanceStore {len(self._accounts)} accounts, {len(self._taken)} requests, {self._store!r}>"

    def reserve(self, asked: Reservation) -> Reservation | Refused | Coroutine[Any, Any, Reservation | Refused]:
        if self._store.is_away or not meters(asked.descriptors):
            return self._store.reserve(asked)
        now_s, line = self._now(), self._line(asked.descriptors)
        if line is None:
            return self._asked(asked, None)
        line.count += 1
        line.sum.add(asked.charge)
        return self._in_advance(asked, line, now_s) or self._asked(asked, line)

    def _in_advance(self, asked: Reservation, line: _Line, now_s: float) -> Reservation | None:
        """`asked`, taken from the account of `line`, if there is room. Has more asked for, if that is needed soon."""
        account = line.account
        granted = None if account is None else account.taken(asked, now_s)
        if (
            line.task is None
            and (granted is None or account is None or account.is_near_end(now_s))
            and now_s >= line.paused_until_s
            and (fresh := line.expected(now_s)) is not None
        ):
            self._roll_soon(line, fresh)
        if granted is not None and account is not None:
            self._taken[asked.id] = account
        return granted

    async def _asked(self, asked: Reservation, line: _Line | None) -> Reservation | Refused:
        for _ in range(_TRIES):
            if line is None or (task := line.task) is None:
                break
            await asyncio.wait({task})
            if (granted := self._in_advance(asked, line, self._now())) is not None:
                return granted
        answer = await self._store.reserve(asked)
        if not isinstance(answer, Refused) or not answer.advanced_ms:
            return answer
        ledger, until_s = asked.descriptors[0].ledger, self._now() + _PAUSE_S
        for each in [each for each in self._lines.values() if each.descriptors[0].ledger == ledger]:
            each.paused_until_s = until_s
            if each.account is not None and each.task is None:
                self._roll_soon(each, Charge())
        await asyncio.sleep(min(answer.advanced_ms / 1000, ADVANCE_S) + _GRACE_S)
        return await self._store.reserve(asked)

    def settle(self, reservation: Reservation, charge: Charge) -> None:
        account = self._taken.pop(reservation.id, None)
        if account is None:
            self._store.settle(reservation, charge)
            return
        account.ended(reservation.charge, charge)
        if not account.running and account.is_closed:
            self._finish(account)
        else:
            self._store.note(account.reservation, account.used.charge)

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        """Nothing to do: see GuardedStore."""

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        return await self._store.standing(descriptors)

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]:
        return await self._store.levels(descriptors)

    async def start(self) -> None:
        await self._store.start()

    async def close(self) -> None:
        """See GuardedStore. What is held in advance is given back."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        for account in tuple(self._accounts):
            self._finish(account)
        self._lines.clear()
        # requests that end later are charged by themselves
        self._taken.clear()
        await self._store.close()

    def check(self) -> None:
        """Assert that each account has what its requests have."""
        self._store.check()
        by_account: dict[_Account, int] = {}
        for account in self._taken.values():
            by_account[account] = by_account.get(account, 0) + 1
        for account in self._accounts:
            assert account.running == by_account.pop(account, 0), f"{account} has other requests than are open"
            assert min(account.left.requests, account.left.tokens, account.left.cost) >= 0, f"{account} is overdrawn"
        assert not by_account, f"requests of accounts that are gone: {by_account}"

    def _line(self, descriptors: tuple[Descriptor, ...]) -> _Line | None:
        """The line of `descriptors`; None if there are too many."""
        key = tuple([descriptor.id for descriptor in descriptors])
        line = self._lines.get(key)
        if line is not None:
            if line.descriptors is descriptors or line.descriptors == descriptors:
                return line
            # the file has other limits now
            if line.account is not None and line.task is None:
                self._roll_soon(line, Charge())
        elif len(self._lines) >= _MOST_LINES and not self._has_swept():
            return None
        line = self._lines[key] = _Line(descriptors, self._now(), 0, _Sum())
        return line

    def _has_swept(self) -> bool:
        now_s = self._now()
        if now_s - self._swept_s >= ADVANCE_S:
            self._swept_s = now_s
            for key, line in tuple(self._lines.items()):
                if line.account is None and line.task is None and now_s - line.since_s >= ADVANCE_S:
                    del self._lines[key]
        return len(self._lines) < _MOST_LINES

    def _roll_soon(self, line: _Line, fresh: Charge) -> None:
        """Have the account of `line` made anew, with `fresh` for requests to come."""
        line.task = task = asyncio.get_running_loop().create_task(self._roll(line, fresh), name="advance of quotas")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _roll(self, line: _Line, fresh: Charge) -> None:
        try:
            account = line.account
            if account is not None:
                # each request that is taken meanwhile has its place in the new one
                for counts in ("requests", "tokens", "cost"):
                    setattr(account.left, counts, min(getattr(account.left, counts), getattr(fresh, counts)))
            if not fresh.requests or not await self._advance(line, fresh):
                if fresh.requests:
                    line.paused_until_s = self._now() + _PAUSE_S
                await self._close(line)
        finally:
            line.task = None
            if (account := line.account) is not None and not account.is_closed:
                self._look_later(line, account)

    async def _advance(self, line: _Line, fresh: Charge) -> bool:
        """Have `fresh` in advance, and what open requests have; whether there was room for it."""
        old, sent_s = line.account, self._now()
        carried = Charge() if old is None else old.open.charge
        asked = Reservation(uuid.uuid4().hex, line.descriptors, carried.and_(fresh), advance=fresh)
        granted = await self._store.advance(asked)
        if granted is None:
            return False
        hour_ms = _HOUR_MS - granted.began_ms % _HOUR_MS
        until_s = sent_s + min(ADVANCE_S, hour_ms / 1000)
        metered = meters(line.descriptors)
        held, used = asked.charge, Charge()
        if old is not None and _hour(old.reservation) == _hour(granted):
            left = _Sum(held.requests, held.tokens, held.cost)
            left.take(old.open)
            held, used = held.and_(old.reservation.charge), old.used.charge
            self._exchange(old, granted)
            account = old
        else:
            if old is not None:
                # of another hour: it stays until its requests have ended
                old.is_closed = True
                old.stop()
                if not old.running:
                    self._finish(old)
            left = _Sum(held.requests, held.tokens, held.cost)
            account = _Account(granted, metered, sent_s, until_s, left, _Sum(), _Sum())
            self._accounts.add(account)
            line.account = account
        account.left, account.began_s, account.until_s = _bound(left, metered), sent_s, until_s
        bases = []
        for meter, level, opened in zip(metered, granted.levels, granted.open, strict=True):
            # the store has not heard yet of what has ended
            ended = meter.unit * getattr(used, meter.counts)
            bases.append((level - meter.unit * getattr(held, meter.counts) + ended, level - opened + ended))
        account.bases = tuple(bases)
        return True

    def _exchange(self, account: _Account, granted: Reservation) -> None:
        """Have `granted` in place of the reservation that `account` has had: that is settled."""
        before, used = account.reservation, account.used.charge
        account.reservation, account.used = granted, _Sum()
        self._store.settle(before, used)

    async def _close(self, line: _Line) -> None:
        """Give back what is left, and keep what open requests have."""
        account = line.account
        if account is None:
            return
        is_told = account.until_s == -math.inf and account.used == _Sum()
        account.stop()
        if account.running and is_told:
            return
        hour_s = (_HOUR_MS - account.reservation.began_ms % _HOUR_MS) / 1000
        if account.running and self._now() - account.began_s < hour_s - _BEFORE_HOUR_S:
            kept = Reservation(uuid.uuid4().hex, line.descriptors, account.open.charge)
            kept = msgspec.structs.replace(kept, began_ms=account.reservation.began_ms)
            await self._store.grant(kept)
            self._exchange(account, kept)
            return
        line.account, account.is_closed = None, True
        if not account.running:
            self._finish(account)

    def _look_later(self, line: _Line, account: _Account) -> None:
        """Look at `account` again when its time is over."""
        wait_s = _TOLD_S if account.until_s == -math.inf else max(0.0, account.until_s - self._now())

        def look() -> None:
            account.timer = None
            if line.task is None and line.account is account:
                self._roll_soon(line, Charge())

        if account.timer is not None:
            account.timer.cancel()
        account.timer = asyncio.get_running_loop().call_later(wait_s, look)

    def _finish(self, account: _Account) -> None:
        """Settle it: all of its requests have ended."""
        account.stop()
        self._accounts.discard(account)
        self._store.settle(account.reservation, account.used.charge)


def _hour(reservation: Reservation) -> int:
    return reservation.began_ms // _HOUR_MS


def _bound(left: _Sum, metered: Sequence[Meter]) -> _Sum:
    """`left`, without bounds where no meter counts."""
    counted = {meter.counts for meter in metered}
    for counts in ("requests", "tokens", "cost"):
        if counts not in counted:
            setattr(left, counts, _UNBOUND)
    return left
