"""The ledger: every open reservation, every meter's level, and the proof that they agree."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from policies.quota.budget import (
    MINUTE_MS,
    Charge,
    Descriptor,
    Meter,
    Refused,
    Reservation,
    Settlement,
    Standing,
    meters,
    refusal,
    standing_of,
)
from policies.quota.periods import Period

KEPT_S = 120.0
"""How long the id of a settled reservation is remembered, so that a message that arrives twice counts once."""

LOOK_EVERY_MS = 100
"""Milliseconds between two looks for settled reservations that can be forgotten, for as long as none can lapse."""

_Key = tuple[str, str]


@dataclass(slots=True)
class _Bucket:
    """One meter's level `used` at the stamp `at`, of which open reservations have `reserved` of a budget. `taken` and
    `settled` are totals since the bucket was created."""

    meter: Meter
    used: int = 0
    at: int = 0
    reserved: int = 0
    taken: int = 0
    settled: int = 0
    holders: int = 0


class MeterLevel(NamedTuple):
    """What was used of one meter, without open reservations, as it is kept beyond the life of its ledger: `used` at the
    stamp `at`, of the meter called `name` (`policies.quota.budget.Meter`)."""

    ledger: str
    name: str
    used: int
    at: int

    @property
    def id(self) -> tuple[str, str]:
        """That of its meter."""
        return self.ledger, self.name

    def is_past(self, now_ms: int) -> bool:
        """Whether nothing of it counts any more at `now_ms`, as far as the name tells: a limit is 1 at least."""
        found = _BUDGET.match(self.name)
        if found is None:
            return self.used <= now_ms - self.at
        return not found["span"] and Period(found["period"] or Period.DAY).number(now_ms) > self.at


_BUDGET = re.compile(r"(?:soft/)?cost(?:/(?:(?P<span>of/)|(?P<period>hour|week|month)))?")
"""The beginning of a budget's name (`policies.quota.budget.Meter`); others are limits a minute."""

_NOTHING = Charge()

_UNCOUNTED = -1
"""The stamp of what was taken while its meter did not hold: nothing."""


class _Hold(msgspec.Struct, frozen=True):
    """The parts of one open reservation: the bucket, the amount and the stamp of each. A bucket with holders stays."""

    parts: tuple[tuple[_Bucket, int, int], ...]
    lapses_ms: int | None


def _no_clock() -> float:
    """The clock of a ledger with callers that give `now`."""
    raise TypeError("a ledger without a clock needs `now`")


class Ledger:
    """Takes from all meters of a request or from none, and settles once.

    A reservation that is not renewed for `lease_s` lapses: its owner is assumed to have crashed, and all of it is given
    back. None: reservations never lapse. `now` is Unix time in seconds; without it that of the `clock` counts. Memory
    is bounded by the open reservations, those settled in the last KEPT_S, and the meters that are not full or were used
    in the last minute.
    """

    def __init__(
        self, *, lease_s: float | None = None, kept_s: float = KEPT_S, clock: Callable[[], float] = _no_clock
    ) -> None:
        self._clock = clock
        self._lease_ms = None if lease_s is None else milliseconds(lease_s)
        self._kept_ms = milliseconds(kept_s)
        self._buckets: dict[_Key, _Bucket] = {}
        self._earlier: dict[_Key, MeterLevel] = {}
        # both are ordered by their end, so that only the first entries have to be checked; a dict searches longer for
        # its first entry the more entries were deleted before it
        self._open: OrderedDict[str, _Hold] = OrderedDict()
        self._settled: OrderedDict[str, int] = OrderedDict()
        self._sweep_ms = self._look_ms = self._now_ms = 0

    def __repr__(self) -> str:
        return f"<Ledger {len(self._open)} open, {len(self._settled)} settled lately, {len(self._buckets)} meters>"

    def reserve(self, asked: Reservation, *, now: float | None = None) -> Reservation | Refused:
        """Take what is `asked` from all its descriptors, or nothing. A known id takes nothing again."""
        now_ms = round((self._clock() if now is None else now) * 1000)
        if not self._now_ms <= now_ms < self._look_ms:
            self._advance(now_ms)
        self._now_ms, bound, charge = now_ms, asked.descriptors, asked.charge
        metered = bound[0].meters if len(bound) == 1 else meters(bound)
        buckets, levels = self._current(metered, now_ms)
        if asked.id in self._open:
            self._renew(asked.id, now_ms)
        elif asked.id not in self._settled:
            amounts, is_beyond = [], False
            for meter, level in zip(metered, levels, strict=True):
                # as `Charge.amounts`
                amount = meter.unit * getattr(charge, meter.counts)
                amounts.append(amount)
                is_beyond = is_beyond or level + amount > meter.capacity
            # what is beyond the capacity may have room nevertheless
            if is_beyond and (refused := refusal(metered, levels, charge, _reserved(buckets), now_ms=now_ms)):
                return refused
            levels = self._hold(asked.id, buckets, amounts, now_ms)
        reserved = []
        for bucket in buckets:
            reserved.append(bucket.reserved)  # noqa: PERF401 - a comprehension is a call before Python 3.12
        standing = standing_of(metered, levels, reserved, now_ms=now_ms)
        return replace(asked, standing=standing, levels=tuple(levels))

    def grant(self, reservation: Reservation, *, now: float) -> None:
        """Take a reservation that another store has already granted, into debt if necessary."""
        now_ms = self._advance(milliseconds(now))
        if reservation.id not in self._open and reservation.id not in self._settled:
            metered = meters(reservation.descriptors)
            amounts = reservation.charge.amounts(metered)
            self._hold(reservation.id, self._current(metered, now_ms)[0], amounts, now_ms)

    def learn(self, descriptors: Sequence[Descriptor], levels: Sequence[int], *, now: float) -> None:
        """Apply usage by other routers: raise each meter of `descriptors` to at least its level of `levels`."""
        now_ms = self._advance(milliseconds(now))
        for bucket, level in zip(self._current(meters(descriptors), now_ms)[0], levels, strict=True):
            bucket.used = max(bucket.used, level)

    def settle(self, reservation: Reservation, charge: Charge, *, now: float | None = None) -> Settlement:
        """Charge the actual usage: give the rest back or take what is missing. Only the first call counts."""
        now_ms = round((self._clock() if now is None else now) * 1000)
        if not self._now_ms <= now_ms < self._look_ms:
            self._advance(now_ms)
        self._now_ms = now_ms
        if reservation.id in self._settled:
            return Settlement.AGAIN
        self._settled[reservation.id] = now_ms + self._kept_ms
        hold = self._open.pop(reservation.id, None)
        if hold is None:
            metered = meters(reservation.descriptors)
            for bucket, amount in zip(self._current(metered, now_ms)[0], charge.amounts(metered), strict=True):
                if not bucket.meter.holds(now_ms):
                    continue
                bucket.used += amount
                bucket.taken += amount
                bucket.settled += amount
            return Settlement.LATE
        self._end(hold, charge, now_ms)
        return Settlement.SETTLED

    def renew(self, ids: Sequence[str], *, now: float) -> None:
        """Extend the leases of open reservations: those of `ids` that are open lapse `lease_s` from now."""
        now_ms = self._advance(milliseconds(now))
        for id in ids:  # noqa: A001
            if id in self._open:
                self._renew(id, now_ms)

    def expire(self, now: float) -> None:
        """Give back lapsed reservations and forget settled ones past their time. Every other call does this too."""
        self._advance(milliseconds(now))

    def standing(self, descriptors: Sequence[Descriptor], *, now: float) -> Standing:
        """The present quota of `descriptors`."""
        metered, levels, now_ms = meters(descriptors), self.levels(descriptors, now=now), milliseconds(now)
        reserved = []
        for meter in metered:
            bucket = self._buckets.get(meter.id)
            is_current = bucket is not None and bucket.at >= meter.stamp(now_ms)
            reserved.append(bucket.reserved if bucket is not None and is_current else 0)
        return standing_of(metered, levels, reserved, now_ms=now_ms)

    def levels(self, descriptors: Sequence[Descriptor], *, now: float) -> list[int]:
        """The present levels of the meters of `descriptors`, in their order."""
        now_ms, levels = self._advance(milliseconds(now)), []
        for meter in meters(descriptors):
            # looking makes no bucket
            bucket = self._buckets.get(meter.id) or self._earlier.get(meter.id)
            levels.append(0 if bucket is None else meter.level(bucket.used, bucket.at, now_ms=now_ms))
        return levels

    def resume(self, levels: Iterable[MeterLevel], *, now: float) -> None:
        """Go on from the `levels` of an earlier ledger. What was used here already is added to them."""
        now_ms = self._advance(milliseconds(now))
        for level in levels:
            if level.is_past(now_ms):
                continue
            self._earlier[level.id] = level
            if (bucket := self._buckets.get(level.id)) is not None:
                self._add_earlier(bucket, now_ms)

    def settled_levels(self) -> Iterator[MeterLevel]:
        """What was used of each meter, without open reservations. The ledger may change between two of them."""
        for key, bucket in tuple(self._buckets.items()):
            if (level := _settled_level(key, bucket)).used:
                yield level
        yield from tuple(self._earlier.values())

    def settled_of(self, descriptors: Sequence[Descriptor]) -> list[MeterLevel]:
        """What was used of each meter of `descriptors` that has counted something, without open reservations."""
        found = [(meter.id, self._buckets.get(meter.id)) for meter in meters(descriptors)]
        return [_settled_level(key, bucket) for key, bucket in found if bucket is not None]

    def check(self) -> None:
        """Assert that the amount taken from every meter equals the open plus the settled amounts, to the unit."""
        opened: dict[_Key, list[int]] = {}
        for hold in self._open.values():
            for bucket, amount, _ in hold.parts:
                opened.setdefault(bucket.meter.id, []).append(amount)
        for key, bucket in self._buckets.items():
            amounts = opened.pop(key, [])
            assert bucket.taken == sum(amounts) + bucket.settled, f"{key} does not balance: {bucket}, open {amounts}"
            assert bucket.holders == len(amounts), f"{key} has {len(amounts)} holders: {bucket}"
            assert bucket.used >= 0, f"{key} is below empty: {bucket}"
        assert not opened, f"reservations hold amounts of meters that do not exist: {opened}"
        assert not self._open.keys() & self._settled.keys(), "a reservation is open and settled"

    def _advance(self, now_ms: int) -> int:
        """Give back and forget what is due at `now_ms`; returns that."""
        if now_ms < self._now_ms:
            self._turn_back(now_ms)
        self._now_ms = now_ms
        while self._lease_ms is not None and self._open:
            lapses_ms = next(iter(self._open.values())).lapses_ms
            if lapses_ms is None or lapses_ms > now_ms:
                break
            self._lapse(next(iter(self._open)), now_ms)
        while self._settled and next(iter(self._settled.values())) <= now_ms:
            del self._settled[next(iter(self._settled))]
        if now_ms >= self._sweep_ms:
            self._sweep_ms = now_ms + MINUTE_MS
            self._forget(now_ms)
        # a lapse is given back when it is due, what is settled may be remembered for longer
        self._look_ms = now_ms + (LOOK_EVERY_MS if self._lease_ms is None else 0)
        return now_ms

    def _turn_back(self, now_ms: int) -> None:
        """Handle a clock that ran ahead and was set back: entries made meanwhile count as made now. Otherwise limits
        would not refill, and nothing would be forgotten, before the clock reaches that time again."""
        for bucket in self._buckets.values():
            bucket.at = min(bucket.at, bucket.meter.stamp(now_ms))
        for id, until in self._settled.items():  # noqa: A001
            self._settled[id] = min(until, now_ms + self._kept_ms)
        latest = self._lapses_ms(now_ms)
        if latest is not None:
            for id, hold in self._open.items():  # noqa: A001
                self._open[id] = replace(hold, lapses_ms=min(latest, hold.lapses_ms or latest))
        self._sweep_ms = min(self._sweep_ms, now_ms + MINUTE_MS)

    def _lapse(self, id: str, now_ms: int) -> None:  # noqa: A002
        hold = self._open.pop(id)
        self._end(hold, _NOTHING, now_ms)

    def _forget(self, now_ms: int) -> None:
        full = [key for key, bucket in self._buckets.items() if not bucket.holders and _is_full(bucket, now_ms)]
        for key in full:
            del self._buckets[key]
        for level in [level for level in self._earlier.values() if level.is_past(now_ms)]:
            del self._earlier[level.id]

    def _hold(
        self,
        id: str,  # noqa: A002 - it is the reservation's id
        buckets: Sequence[_Bucket],
        amounts: Sequence[int],
        now_ms: int,
    ) -> list[int]:
        """Take the `amounts` of a reservation from the current `buckets` of its meters; returns the levels after it."""
        parts, levels = [], []
        for bucket, amount in zip(buckets, amounts, strict=True):
            is_counted = bucket.meter.period is None or bucket.meter.holds(now_ms)
            taken = amount if is_counted else 0
            bucket.used += taken
            bucket.reserved += taken
            bucket.taken += taken
            bucket.holders += 1
            parts.append((bucket, taken, bucket.at if is_counted else _UNCOUNTED))
            levels.append(bucket.used)
        lapses_ms = None if self._lease_ms is None else now_ms + self._lease_ms
        self._open[id] = _Hold(tuple(parts), lapses_ms)
        return levels

    def _end(self, hold: _Hold, charge: Charge, now_ms: int) -> None:
        """Take `charge` instead of what `hold` has reserved."""
        for bucket, reserved, at in hold.parts:
            bucket.holders -= 1
            if at == _UNCOUNTED:
                continue
            meter = bucket.meter
            amount = meter.unit * getattr(charge, meter.counts)
            if amount > reserved:
                # what has been refilled meanwhile pays for nothing that is taken now
                self._current((meter,), now_ms)
            # a request belongs to the period in which it began: yesterday's difference does not touch today's budget
            if at >= bucket.at or meter.period is None:
                bucket.used = max(0, bucket.used + amount - reserved)
                bucket.reserved = max(0, bucket.reserved - reserved)
            bucket.taken += amount - reserved
            bucket.settled += amount

    def _renew(self, id: str, now_ms: int) -> None:  # noqa: A002
        self._open[id] = replace(self._open.pop(id), lapses_ms=self._lapses_ms(now_ms))

    def _lapses_ms(self, now_ms: int) -> int | None:
        return None if self._lease_ms is None else now_ms + self._lease_ms

    def _add_earlier(self, bucket: _Bucket, now_ms: int) -> None:
        """Have `bucket` hold what an earlier ledger has counted for its meter, too."""
        earlier = self._earlier.pop(bucket.meter.id, None)
        if earlier is not None:
            # a clock that was ahead then is right now
            meter, stamp = bucket.meter, bucket.meter.stamp(now_ms)
            used = meter.level(earlier.used, min(earlier.at, stamp), now_ms=now_ms)
            bucket.used = meter.level(bucket.used, bucket.at, now_ms=now_ms) + used
            bucket.at = max(bucket.at, stamp)

    def _current(self, metered: Sequence[Meter], now_ms: int) -> tuple[list[_Bucket], list[int]]:
        """The buckets of `metered`, and their levels, lowered to those of now; a clock that went back lowers none."""
        buckets, levels = [], []
        for meter in metered:
            bucket = self._buckets.get(meter.id)
            if bucket is None:
                bucket = self._buckets[meter.id] = _Bucket(meter)
                self._add_earlier(bucket, now_ms)
            bucket.meter = meter  # the file may have changed the limit
            stamp = now_ms if meter.period is None else meter.stamp(now_ms)
            if stamp > bucket.at:
                if bucket.used and meter.period is None:
                    # as `Meter.level`, of a meter that nearly every request has
                    bucket.used = max(0, bucket.used - meter.limit * (now_ms - bucket.at))
                elif bucket.used:
                    bucket.used = meter.level(bucket.used, bucket.at, now_ms=now_ms)
                    bucket.reserved = 0
                bucket.at = stamp
            buckets.append(bucket)
            levels.append(bucket.used)
        return buckets, levels


def _reserved(buckets: Sequence[_Bucket]) -> list[int]:
    """What open reservations have of each."""
    return [bucket.reserved for bucket in buckets]


def _settled_level(key: _Key, bucket: _Bucket) -> MeterLevel:
    return MeterLevel(*key, max(0, bucket.used - (bucket.taken - bucket.settled)), bucket.at)


def _is_full(bucket: _Bucket, now_ms: int) -> bool:
    """Whether nothing of it is used; also that of an end user in which nothing ever counts again: there may be many."""
    meter = bucket.meter
    is_over = meter.descriptor.user is not None and meter.period is not None and meter.period.is_over(now_ms)
    return is_over or not meter.level(bucket.used, bucket.at, now_ms=now_ms)


def milliseconds(seconds: float) -> int:
    """`seconds` as whole milliseconds. Rounded, so that `now + retry_after_s` is not too early by a rounding error."""
    return round(seconds * 1000)
