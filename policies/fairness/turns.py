"""Which class is served next: by rank, age and the floors of classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from policies.fairness.virtual_time import Account, VirtualTime
from policies.nouns import ServiceClass

FLOOR_WINDOW_S = 60.0
"""Served seconds, summed over all classes, that a class can be ahead of its floor or behind it.

Measured in served seconds and not by a clock, because a floor is a share of these: a class that had the backends to
itself all day can claim its floor again after 60 of them (plus the excess of its last ticket), with 1 backend or with
100. A shorter window would forget the cost of one long prompt; a longer one would charge for capacity that was idle
yesterday.
"""


def effective_rank(rank: int, waited_s: float, ageing_s: float) -> int:
    """`rank` (0 is served first), improved by one for each whole `ageing_s` of waiting, but never better than 0.

    Rank 0 is the limit, as on a shard: there the weights decide, so old batch work slows new work of rank 0 but does
    not stop it.
    """
    return max(0, rank - int(max(0.0, waited_s) / ageing_s)) if rank > 0 else rank


@dataclass(slots=True)
class Standing:
    """One class among the others. `owed_s` is the service that its floor still claims; negative after an excess."""

    name: str
    rank: int
    floor: float
    account: Account
    owed_s: float = 0.0

    def copy(self) -> Standing:
        """The same standing with an account of its own."""
        # written out: copy.copy takes 5 us and this takes 1, and every walk of the queue copies each class once
        mine = self.account
        account = Account(mine.weight, mine.tag, mine.touched_at)
        return Standing(self.name, self.rank, self.floor, account, self.owed_s)

    def reconfigure(self, service_class: ServiceClass) -> None:
        """Use the rank, weight and floor of `service_class` from now on."""
        self.rank, self.floor, self.account.weight = service_class.rank, service_class.floor, service_class.weight
        self.owed_s = self.owed_s if self.floor else 0.0

    def accrue(self, seconds: float, *, own: bool, waits: bool) -> None:
        """Record that `seconds` were served, to this class if `own`.

        While the class waits, it is owed its floor's share of them, up to one window. An idle class is owed nothing.
        Service beyond the floor counts against the class until the excess equals one window. Further service is free,
        because no class of a better rank wanted it.
        """
        window_s, before = self.floor * FLOOR_WINDOW_S, self.owed_s
        after = before + self.floor * seconds
        if own:
            after = after - seconds if seconds < 0 or before > -window_s else before
        elif seconds < 0:
            after = max(after, min(before, -window_s))
        self.owed_s = min(after, max(window_s, self.floor * seconds) if waits else 0.0)


@dataclass(slots=True)
class Turns:
    """Chooses the next class. `standings` by name; each `ageing_s` of waiting improves the rank of a class by one.

    1. Classes that wait and are owed service by their floors. Of several, the one that is owed most in relation to its
       floor.
    2. The class of the best effective rank. The age of a class is that of its oldest ticket.
    3. Of equal effective ranks, the class that has received least service for its weight.
    """

    standings: dict[str, Standing]
    ageing_s: float
    clock: VirtualTime = field(default_factory=VirtualTime)
    has_floors: bool = False
    """Has any class one?"""

    def copy(self) -> Turns:
        """A copy, for trying out an order of service."""
        standings = {name: standing.copy() for name, standing in self.standings.items()}
        clock = VirtualTime(self.clock.slack_s, self.clock.reached)
        return Turns(standings, self.ageing_s, clock, self.has_floors)

    def rank_of(self, name: str, oldest_at: float | None, now: float) -> int:
        """The effective rank of a class, if its oldest ticket arrived at `oldest_at`; its own rank without tickets."""
        rank = self.standings[name].rank
        return rank if oldest_at is None else effective_rank(rank, now - oldest_at, self.ageing_s)

    def next(self, oldest_at: Mapping[str, float], now: float) -> str:
        """The class to serve next, out of `oldest_at`: for each waiting class, the arrival of its oldest ticket.

        Raises ValueError if it is empty.
        """
        if len(oldest_at) == 1:
            return next(iter(oldest_at))
        best: tuple[float, int, float, int, str] | None = None
        for name, at in oldest_at.items():
            standing = self.standings[name]
            if standing.owed_s > 0:
                turn = (-standing.owed_s / standing.floor, 0, 0.0, standing.rank, name)
            else:
                # most classes are young, and a call for each, eight tickets deep, would cost a third of a walk
                young = now - at < self.ageing_s
                rank = standing.rank if young else effective_rank(standing.rank, now - at, self.ageing_s)
                turn = (0.0, rank, self.clock.start(standing.account), standing.rank, name)
            if best is None or turn < best:
                best = turn
        if best is None:
            raise ValueError("no class waits")
        return best[4]

    def serve(self, name: str, seconds: float, now: float, *, waiting: Collection[str]) -> None:
        """Record `seconds` of service of a class. `waiting` are the classes that had tickets at that moment."""
        # as `VirtualTime.serve`, without a call: every request is charged
        account, clock = self.standings[name].account, self.clock
        start = max(account.tag, clock.reached - clock.slack_s)
        clock.reached = max(clock.reached, start)
        account.tag, account.touched_at = start + seconds / account.weight, now
        if self.has_floors:
            self._accrue(name, seconds, waiting)

    def correct(self, name: str, seconds: float, *, waiting: Collection[str]) -> None:
        """Correct the account of a class that used `seconds` more than it was charged; fewer if negative."""
        account = self.standings[name].account
        account.tag += seconds / account.weight
        if self.has_floors:
            self._accrue(name, seconds, waiting)

    def _accrue(self, name: str, seconds: float, waiting: Collection[str]) -> None:
        for other, standing in self.standings.items():
            if standing.floor:
                standing.accrue(seconds, own=other == name, waits=other in waiting)

    def ahead_s(self, name: str, own_s: float, waiting: Mapping[str, tuple[float, float]], now: float) -> float:
        """Seconds of service, over all classes, that come before `own_s` seconds of this class are served.

        `waiting`: for each class with tickets, the arrival of its oldest ticket and the seconds of its backlog.
        """
        me = self.standings[name]
        rank = self.rank_of(name, waiting[name][0] if name in waiting else None, now)
        total, worse = own_s, []
        for other, (oldest_at, seconds) in waiting.items():
            if other == name:
                continue
            standing = self.standings[other]
            other_rank = self.rank_of(other, oldest_at, now)
            if other_rank < rank:
                total += seconds
            elif other_rank == rank:
                lead = own_s / me.account.weight + self.clock.start(me.account) - self.clock.start(standing.account)
                total += min(seconds, max(0.0, lead) * standing.account.weight)
            else:
                worse.append((standing.floor, seconds))
        left = max(1e-9, 1.0 - sum(floor for floor, _ in worse))
        total += sum(min(seconds, floor * total / left) for floor, seconds in worse)
        return min(total, max(own_s, (own_s - me.owed_s) / me.floor)) if me.floor else total
