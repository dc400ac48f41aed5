"""The fair queue: which class is served next, which tenant of it, and which ticket of that, by the service that each
has had for its weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from policies.fairness.tenants import Account, TenantQueues, VirtualTime
from policies.fairness.ticket import Backlog, Ticket
from policies.fairness.walk import Walk
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


class FairQueue:
    """Fair between the tenants of a class, ranked between classes, charged in seconds. Binding is late: the queue
    offers its tickets in order, and a backend with room takes the tickets that fit.

    Between classes: floors, then rank improved by age, then weight (`Turns`). Within a class: virtual time between
    tenants (`VirtualTime`), and first in, first out for each tenant. Prices are predictions: `take` charges `cost_s`,
    and `correct` charges or returns the difference.

    No ticket waits forever. A ticket of rank r counts as rank 0 after r x `ageing_s`, and its class with it. Let w be
    the share of its class in the weights of the classes that wait, t the share of its tenant in the weights of the
    tenants that wait, S the seconds that its tenant has queued before it and still owes, C and T the numbers of waiting
    classes and tenants, and c the largest cost. From that moment the ticket is served before more than
    `S / (w t) + (C + T / w) x c` seconds are served, whatever arrives meanwhile, provided that backends have room for
    it when its turn comes. Floors of other classes reduce w to the part that they leave. For a class with a floor f of
    its own the same bound holds at once, with f in the place of w.

    Push the tickets of a class in order of arrival; otherwise the age of the class is that of the ticket pushed first.
    """

    def __init__(self, classes: Mapping[str, ServiceClass], weights: Mapping[str, float], ageing_s: float) -> None:
        self._weights: Mapping[str, float] = {}
        self._queues: dict[str, TenantQueues] = {}
        self._turns = Turns({}, 1.0)
        self._backlog = Backlog()
        self._of_tenant: dict[str, Backlog] = {}
        self._waiting: dict[str, Ticket] = {}
        self._charged: dict[str, float] = {}
        self._changes = self._last_rank = 0
        self.reconfigure(classes, weights, ageing_s)

    def __repr__(self) -> str:
        classes = ", ".join(f"{name} {len(queue)}" for name, queue in self._queues.items() if queue) or "empty"
        return f"<FairQueue {classes}; {self._backlog.seconds:.3g} s wait, {len(self._charged)} charged>"

    def __len__(self) -> int:
        """The number of tickets that wait."""
        return self._backlog.requests

    def __contains__(self, ticket_id: object) -> bool:
        """Whether a ticket with this id waits."""
        return ticket_id in self._waiting

    @property
    def charged(self) -> int:
        """The number of tickets that were charged and not yet corrected."""
        return len(self._charged)

    @property
    def backlog(self) -> Backlog:
        """The backlog of the whole queue."""
        return replace(self._backlog)

    def of_class(self, service_class: str) -> Backlog:
        """The backlog of a class."""
        queue = self._queues.get(service_class)
        return replace(queue.backlog) if queue else Backlog()

    def of_tenant(self, tenant: str) -> Backlog:
        """The backlog of a tenant, over all classes."""
        return replace(self._of_tenant.get(tenant, Backlog()))

    def reconfigure(self, classes: Mapping[str, ServiceClass], weights: Mapping[str, float], ageing_s: float) -> None:
        """Replace the classes, the tenants' weights and the ageing. Waiting tickets and all accounts are kept.

        A removed class that still has tickets ranks behind all others, with weight 1 and no floor. A tenant without a
        weight has weight 1. Raises ValueError, and changes nothing, for a weight or an ageing that is not above zero.
        """
        wrong = [name for name, weight in weights.items() if not 0 < weight < inf]
        wrong += [found.name for found in classes.values() if not 0 < found.weight < inf]
        if wrong or not 0 < ageing_s < inf:
            raise ValueError(f"weights and ageing must be above zero; that of {', '.join(wrong) or 'the queue'} is not")
        self._changes += 1
        self._weights, self._turns.ageing_s = dict(weights), ageing_s
        self._last_rank = 1 + max((service_class.rank for service_class in classes.values()), default=-1)
        for name in [name for name, queue in self._queues.items() if not queue and name not in classes]:
            del self._queues[name], self._turns.standings[name]
        for name in [*self._queues, *classes]:
            self._queue(name).reweigh(self._weights)
            self._turns.standings[name].reconfigure(classes.get(name) or ServiceClass(name, self._last_rank))
        self._turns.has_floors = any(standing.floor for standing in self._turns.standings.values())

    def push(self, ticket: Ticket, now: float) -> None:
        """Let `ticket` wait.

        Raises ValueError if it waits already, was charged and not yet corrected, or costs no finite number of seconds.
        """
        if not 0 <= ticket.cost_s < inf or ticket.id in self._waiting or ticket.id in self._charged:
            raise _not_new(ticket)
        self._queue(ticket.service_class).push(ticket, now)
        self._note(ticket)

    def push_front(self, ticket: Ticket) -> None:
        """Let `ticket` wait again after its backend failed: first in its class, and without a second charge.

        Raises ValueError if it waits already or was never charged.
        """
        if ticket.id in self._waiting or ticket.id not in self._charged:
            raise ValueError(f"'{ticket.id}' waits already or was never taken, so it cannot come back")
        self._queue(ticket.service_class).push_front(ticket)
        self._note(ticket)

    def remove(self, ticket_id: str) -> Ticket | None:
        """Take a ticket out of the queue and return it; None if it was not waiting.

        A ticket that had been put back by `push_front` stays charged until `correct` is called with its actual cost.
        """
        ticket = self._waiting.get(ticket_id)
        if ticket is not None:
            self._queues[ticket.service_class].remove(ticket)
            self._forget(ticket)
        return ticket

    def order(self, now: float) -> Iterator[Ticket]:
        """The waiting tickets in order of service, as if each were taken in its turn.

        The cost grows with the number of tickets read: for each, the classes and the logarithm of the tickets so far.
        The queue must not change between two tickets, so collect the placed tickets first and take them afterwards.
        Raises RuntimeError if the queue changed.
        """
        changes, turns = self._changes, self._turns.copy()
        walks = {name: Walk(queue) for name, queue in self._queues.items() if queue}
        oldest_at = {name: at for name, walk in walks.items() if (at := walk.oldest_at) is not None}
        while oldest_at:
            name = turns.next(oldest_at, now)
            ticket, is_paid = walks[name].step()
            yield ticket
            if changes != self._changes:
                raise RuntimeError("the queue changed during a walk: collect tickets first, then take them")
            if not is_paid:
                turns.serve(name, ticket.cost_s, now, waiting=oldest_at)
            if (at := walks[name].oldest_at) is None:
                del oldest_at[name]
            else:
                oldest_at[name] = at

    def take(self, ticket_id: str, now: float) -> Ticket:
        """Take a ticket out of the queue to serve it. Its class and tenant pay its cost unless it was charged before.

        Raises KeyError if it does not wait.
        """
        ticket = self._waiting[ticket_id]
        if ticket_id not in self._charged:
            self._charged[ticket_id] = ticket.cost_s
            self._turns.serve(ticket.service_class, ticket.cost_s, now, waiting=self._backlogged())
        self._queues[ticket.service_class].take(ticket, now)
        self._forget(ticket)
        return ticket

    def charge(self, ticket: Ticket, now: float) -> None:
        """Charge a ticket that found room at once while no other ticket waited for that room, so it never queued.

        Raises ValueError as `push` does.
        """
        if not 0 <= ticket.cost_s < inf or ticket.id in self._waiting or ticket.id in self._charged:
            raise _not_new(ticket)
        queue = self._queues.get(ticket.service_class)
        if queue is None:
            queue = self._queue(ticket.service_class)
        self._changes += 1
        self._charged[ticket.id] = ticket.cost_s
        waiting = self._backlogged() if self._waiting else ()
        self._turns.serve(ticket.service_class, ticket.cost_s, now, waiting=waiting)
        queue.charge(ticket, now)

    def correct(self, ticket: Ticket, actual_s: float, now: float) -> None:
        """Replace the predicted cost of `ticket` by `actual_s`: charge what is missing, or return the excess.

        Only the first call counts. Later calls, and calls for a ticket that was never charged, change nothing, so the
        code that ends a request can always call this. Raises ValueError if the ticket waits (again), or if `actual_s`
        is not a finite number.
        """
        if ticket.id in self._waiting:
            raise ValueError(f"'{ticket.id}' waits: take or remove it before correcting it")
        if not 0 <= actual_s < inf:
            raise ValueError(f"a request uses a finite number of seconds, not {actual_s}")
        charged = self._charged.pop(ticket.id, None)
        queue = self._queues.get(ticket.service_class)
        # a class that was removed from the file has no account any more
        if charged is None or queue is None or actual_s == charged:
            return
        self._changes += 1
        self._turns.correct(
            ticket.service_class, actual_s - charged, waiting=self._backlogged() if self._waiting else ()
        )
        queue.correct(ticket.tenant, actual_s - charged, now)

    def ahead_s(self, service_class: str, tenant: str, now: float) -> float:
        """Predicted backend seconds that are served before a new ticket of this class and tenant would be.

        Computed from sums alone, so it costs one look at each class. Divide by the number of requests that run side by
        side to get a waiting time. It includes all classes of better rank, the shares of equal ranks and of other
        tenants as far as they have work, and floors. It ignores later arrivals and ageing (too low), and assumes that
        the work of other tenants is spread evenly over their weights (too high if one of them has most of it).
        """
        queue = self._queue(service_class)
        waiting = {
            name: (at, tenants.backlog.seconds)
            for name, tenants in self._queues.items()
            if (at := tenants.oldest_at) is not None
        }
        return self._turns.ahead_s(service_class, queue.ahead_s(tenant), waiting, now)

    def check(self) -> None:
        """Assert that every ticket is in exactly one place, that sums agree, and that no credit exceeds its bound."""
        for queue in self._queues.values():
            queue.check()
        inside = [name for queue in self._queues.values() for name in (*queue.arrivals, *queue.returned)]
        assert len(inside) == len(set(inside)) == len(self), "a ticket is lost or in two places"
        assert set(inside) == set(self._waiting), "a waiting ticket is not in the queue's table"
        assert self._queues.keys() == self._turns.standings.keys(), "a class has no standing"
        returned = {name for queue in self._queues.values() for name in queue.returned}
        assert returned == self._waiting.keys() & self._charged.keys(), "a paid ticket stands among unpaid ones"
        of_tenant = self._of_tenant.values()
        assert sum(backlog.requests for backlog in of_tenant) == len(self), "tenants' requests do not add up"
        assert sum(backlog.tokens for backlog in of_tenant) == self._backlog.tokens, "tokens do not add up"
        assert all(backlog.requests for backlog in of_tenant), "a tenant is kept without waiting requests"

    def _queue(self, name: str) -> TenantQueues:
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = TenantQueues(self._weights)
            account = Account(1.0, self._turns.clock.reached)
            self._turns.standings[name] = Standing(name, self._last_rank, 0.0, account)
        return queue

    def _backlogged(self) -> set[str]:
        """The classes that have tickets."""
        return {name for name, queue in self._queues.items() if queue}

    def _note(self, ticket: Ticket) -> None:
        self._changes += 1
        self._waiting[ticket.id] = ticket
        self._backlog.add(ticket)
        self._of_tenant.setdefault(ticket.tenant, Backlog()).add(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._changes += 1
        del self._waiting[ticket.id]
        self._backlog.subtract(ticket)
        of_tenant = self._of_tenant[ticket.tenant]
        of_tenant.subtract(ticket)
        if not of_tenant.requests:
            del self._of_tenant[ticket.tenant]


def _not_new(ticket: Ticket) -> ValueError:
    """The error for a ticket that cannot be pushed or charged."""
    if not 0 <= ticket.cost_s < inf:
        return ValueError(f"a ticket must cost a finite number of seconds, not {ticket.cost_s}")
    return ValueError(f"'{ticket.id}' waits already or was charged and not corrected yet")
