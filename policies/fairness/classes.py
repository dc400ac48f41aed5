"""Turns: which service class is served next: floors first, then rank and age, then weight."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from policies.fairness.virtual_time import Account, VirtualTime
from policies.nouns import ServiceClass

FLOOR_WINDOW_S = 60.0
"""Served seconds, of all classes together, over which a class is held to its floor, forward and backward.

Counted in seconds served and not on a clock, for a floor is a share of these: a class that had the backends to itself
all day is back at its floor after 60 of them (and what its last ticket had too much), with 1 backend or 100. Shorter
would forget what one long prompt took; longer would let what was free yesterday be paid for today.
"""


def effective_rank(rank: int, waited_s: float, ageing_s: float) -> int:
    """`rank` (0 is served first), better by one for each whole `ageing_s` of waiting, but never better than 0.

    It ends at 0, as on a shard: there the weights decide, so that old batch work slows what is new and of rank 0, but
    does not stop it.
    """
    return max(0, rank - int(max(0.0, waited_s) / ageing_s)) if rank > 0 else rank


@dataclass(slots=True)
class Standing:
    """One class between the others. `owed_s` of service is what its floor still asks for, negative if it had more."""

    name: str
    rank: int
    floor: float
    account: Account
    owed_s: float = 0.0

    def copy(self) -> Standing:
        """The same standing with an account of its own."""
        # written out: copy.copy takes 5 us where this takes 1, and every walk of the queue needs one for each class
        mine = self.account
        account = Account(mine.weight, mine.tag, mine.touched_at)
        return Standing(self.name, self.rank, self.floor, account, self.owed_s)

    def reconfigure(self, service_class: ServiceClass) -> None:
        """Rank, weight and floor are those of `service_class` from now on."""
        self.rank, self.floor, self.account.weight = service_class.rank, service_class.floor, service_class.weight
        self.owed_s = self.owed_s if self.floor else 0.0

    def accrue(self, seconds: float, *, own: bool, waits: bool) -> None:
        """`seconds` were served, to this class if `own`.

        While it waits, its floor's share of them is owed to it, up to what one window holds. An idle class is owed
        nothing. What it gets beyond its floor counts against it until that is a window's worth; from there on it is
        free, for nobody of a better rank wanted it.
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
    """Who is next between classes. `standings` by name; `ageing_s` of waiting make a class one rank better.

    1. A class that waits and is owed service by its floor; of several the one that is owed most for its floor.
    2. The best effective rank; a class is as old as its oldest ticket.
    3. Of equal effective ranks the one that has had less for its weight.
    """

    standings: dict[str, Standing]
    ageing_s: float
    clock: VirtualTime = field(default_factory=VirtualTime)

    def copy(self) -> Turns:
        """The same turns, to try things out on."""
        standings = {name: standing.copy() for name, standing in self.standings.items()}
        return Turns(standings, self.ageing_s, VirtualTime(self.clock.slack_s, self.clock.reached))

    def rank_of(self, name: str, oldest_at: float | None, now: float) -> int:
        """The effective rank of a class whose oldest ticket arrived then; None if it has none."""
        rank = self.standings[name].rank
        return rank if oldest_at is None else effective_rank(rank, now - oldest_at, self.ageing_s)

    def next(self, oldest_at: Mapping[str, float], now: float) -> str:
        """The class whose turn it is, of those in `oldest_at`: when the oldest ticket of each arrived.

        Raises ValueError if there is none.
        """
        if len(oldest_at) == 1:
            return next(iter(oldest_at))
        best: tuple[float, int, float, int, str] | None = None
        for name, at in oldest_at.items():
            one = self.standings[name]
            if one.owed_s > 0:
                turn = (-one.owed_s / one.floor, 0, 0.0, one.rank, name)
            else:
                # most are young: a call for each, eight tickets deep, would be a third of what a walk costs
                rank = one.rank if now - at < self.ageing_s else effective_rank(one.rank, now - at, self.ageing_s)
                turn = (0.0, rank, self.clock.start(one.account), one.rank, name)
            if best is None or turn < best:
                best = turn
        if best is None:
            raise ValueError("no class waits")
        return best[4]

    def serve(self, name: str, seconds: float, now: float, *, waiting: Collection[str]) -> None:
        """The class gets `seconds` of service. `waiting` are the classes that had tickets when it did."""
        self.clock.serve(self.standings[name].account, seconds, now)
        self._accrue(name, seconds, waiting)

    def correct(self, name: str, seconds: float, *, waiting: Collection[str]) -> None:
        """The class used `seconds` more than it was charged; fewer if negative."""
        account = self.standings[name].account
        account.tag += seconds / account.weight
        self._accrue(name, seconds, waiting)

    def _accrue(self, name: str, seconds: float, waiting: Collection[str]) -> None:
        for other, standing in self.standings.items():
            if standing.floor:
                standing.accrue(seconds, own=other == name, waits=other in waiting)

    def ahead_s(self, name: str, own_s: float, waiting: Mapping[str, tuple[float, float]], now: float) -> float:
        """Seconds of all classes that are served before `own_s` seconds of this one are.

        `waiting`: for each class with tickets, when its oldest arrived and its seconds.
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
