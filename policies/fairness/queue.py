"""FairQueue: what waits for a backend, and in which order it should be served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from policies.fairness.backlog import Backlog
from policies.fairness.classes import Standing, Turns
from policies.fairness.tenants import TenantQueues
from policies.fairness.ticket import Ticket
from policies.fairness.virtual_time import Account
from policies.fairness.walk import Walk
from policies.nouns import ServiceClass


class FairQueue:
    """Fair between tenants inside a class, ranked between classes, charged in seconds. Late binding: it offers tickets
    in order, and whoever has room takes the ones that fit.

    Between classes: floors, then rank improved by age, then weight (`Turns`). Inside: virtual time between tenants
    (`VirtualTime`), each tenant first in first out. Prices are predicted: `take` charges `cost_s`, `correct` the rest.

    Nobody waits forever. A ticket of rank r counts as rank 0 after r x `ageing_s`, and its class with it. From then on,
    with w the share of its class's weight and t that of its tenant's (among those that wait), it is served before
    more than `S / (w t) + (C + T / w) x c` seconds are, S being what its own tenant has before it and still owes, C and
    T how many classes and tenants wait, c the largest cost: whatever arrives meanwhile, as long as backends have room
    for it when it is its turn. Floors of other classes leave their rest of w; with a floor f of its own, the same holds
    at once with f in the place of w.

    Tickets of a class are pushed in the order of their arrival; otherwise ages are those of whoever was pushed first.
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
        """Tickets that wait."""
        return self._backlog.requests

    def __contains__(self, ticket_id: object) -> bool:
        """Does a ticket with this id wait?"""
        return ticket_id in self._waiting

    @property
    def charged(self) -> int:
        """Tickets that were charged and not corrected yet."""
        return len(self._charged)

    @property
    def backlog(self) -> Backlog:
        """All that waits."""
        return replace(self._backlog)

    def of_class(self, service_class: str) -> Backlog:
        """What waits in a class."""
        queue = self._queues.get(service_class)
        return replace(queue.backlog) if queue else Backlog()

    def of_tenant(self, tenant: str) -> Backlog:
        """What waits of a tenant, in all classes."""
        return replace(self._of_tenant.get(tenant, Backlog()))

    def reconfigure(self, classes: Mapping[str, ServiceClass], weights: Mapping[str, float], ageing_s: float) -> None:
        """Classes, tenants' weights and ageing are these from now on; what waits stays, and nobody's account is lost.

        Classes that are gone but have tickets rank behind all others, with weight 1 and no floor; tenants that have no
        weight have 1. Raises ValueError, and changes nothing, for a weight or an ageing that is not above zero.
        """
        wrong = [name for name, weight in weights.items() if not 0 < weight < inf]
        wrong += [one.name for one in classes.values() if not 0 < one.weight < inf]
        if wrong or not 0 < ageing_s < inf:
            raise ValueError(f"weights and ageing are above zero, unlike that of {', '.join(wrong) or 'the queue'}")
        self._changes += 1
        self._weights, self._turns.ageing_s = dict(weights), ageing_s
        self._last_rank = 1 + max((one.rank for one in classes.values()), default=-1)
        for name in [name for name, queue in self._queues.items() if not queue and name not in classes]:
            del self._queues[name], self._turns.standings[name]
        for name in [*self._queues, *classes]:
            self._queue(name).reweigh(self._weights)
            self._turns.standings[name].reconfigure(classes.get(name) or ServiceClass(name, self._last_rank))

    def push(self, ticket: Ticket, now: float) -> None:
        """`ticket` waits. Raises ValueError if it waits already, or was charged and not corrected yet."""
        self._require_new(ticket)
        self._queue(ticket.service_class).push(ticket, now)
        self._note(ticket)

    def push_front(self, ticket: Ticket) -> None:
        """`ticket`, whose backend failed, waits again: first in its class and without being charged twice.

        Raises ValueError if it waits already or was never charged.
        """
        if ticket.id in self._waiting or ticket.id not in self._charged:
            raise ValueError(f"'{ticket.id}' waits already or was never taken, so it cannot come back")
        self._queue(ticket.service_class).push_front(ticket)
        self._note(ticket)

    def remove(self, ticket_id: str) -> Ticket | None:
        """The ticket, which no longer waits; None if it did not.

        One that had come back stays charged until `correct` says what it used.
        """
        ticket = self._waiting.get(ticket_id)
        if ticket is not None:
            self._queues[ticket.service_class].remove(ticket)
            self._forget(ticket)
        return ticket

    def order(self, now: float) -> Iterator[Ticket]:
        """The tickets that wait, in the order in which they should be served if each is taken in turn.

        Looking costs about as much as was looked at: classes, and the logarithm of the tickets so far, for each. The
        queue must not change between two of them: collect what was placed, then take it. Raises RuntimeError if it did.
        """
        changes, turns = self._changes, self._turns.copy()
        walks = {name: Walk(queue) for name, queue in self._queues.items() if queue}
        oldest_at = {name: at for name, walk in walks.items() if (at := walk.oldest_at) is not None}
        while oldest_at:
            name = turns.next(oldest_at, now)
            ticket, is_paid = walks[name].step()
            yield ticket
            if changes != self._changes:
                raise RuntimeError("the queue changed while somebody walked it: collect tickets first, then take them")
            if not is_paid:
                turns.serve(name, ticket.cost_s, now, waiting=oldest_at)
            if (at := walks[name].oldest_at) is None:
                del oldest_at[name]
            else:
                oldest_at[name] = at

    def take(self, ticket_id: str, now: float) -> Ticket:
        """The ticket, which no longer waits; its class and tenant are charged what it costs, unless it came back.

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
        """A ticket that finds room at once, and nobody waiting for it, is charged without having waited.

        Raises ValueError if it waits, or was charged and not corrected yet.
        """
        self._require_new(ticket)
        queue = self._queue(ticket.service_class)
        self._changes += 1
        self._charged[ticket.id] = ticket.cost_s
        self._turns.serve(ticket.service_class, ticket.cost_s, now, waiting=self._backlogged())
        queue.charge(ticket, now)

    def correct(self, ticket: Ticket, actual_s: float, now: float) -> None:
        """`ticket` used `actual_s`: what it was not charged is charged now, what it was charged too much is given back.

        Once: a second time, or for a ticket that was never charged, nothing happens. So whoever ends a request may
        always call it. Raises ValueError if it waits (again), or if the seconds are no finite number.
        """
        if ticket.id in self._waiting:
            raise ValueError(f"'{ticket.id}' waits: take or remove it before it is corrected")
        if not 0 <= actual_s < inf:
            raise ValueError(f"a request uses a finite number of seconds, not {actual_s}")
        charged = self._charged.pop(ticket.id, None)
        queue = self._queues.get(ticket.service_class)
        # a class that is gone from the file has no account any more
        if charged is None or queue is None or actual_s == charged:
            return
        self._changes += 1
        self._turns.correct(ticket.service_class, actual_s - charged, waiting=self._backlogged())
        queue.correct(ticket.tenant, actual_s - charged, now)

    def ahead_s(self, service_class: str, tenant: str, now: float) -> float:
        """Predicted seconds of backends' time that are served before a new ticket of this class and tenant would be.

        From sums alone, so it costs one look at each class. Divided by how many requests run side by side it is a
        waiting time. It counts all of better ranks, the shares of equal ranks and of other tenants as far as they
        have work, and floors. It does not foresee who arrives later or ages meanwhile (too little), and takes the
        work of other tenants as spread evenly over their weights (too much where one of them has most of it).
        """
        queue = self._queue(service_class)
        waiting = {
            name: (at, one.backlog.seconds) for name, one in self._queues.items() if (at := one.oldest_at) is not None
        }
        return self._turns.ahead_s(service_class, queue.ahead_s(tenant), waiting, now)

    def check(self) -> None:
        """Prove that every ticket is in exactly one place, that sums agree, and that nobody's credit is above bound."""
        for queue in self._queues.values():
            queue.check()
        inside = [name for queue in self._queues.values() for name in (*queue.arrivals, *queue.returned)]
        assert len(inside) == len(set(inside)) == len(self), "a ticket is lost or in two places"
        assert set(inside) == set(self._waiting), "a ticket waits that nobody knows"
        assert self._queues.keys() == self._turns.standings.keys(), "a class has no standing"
        returned = {name for queue in self._queues.values() for name in queue.returned}
        assert returned == self._waiting.keys() & self._charged.keys(), "a paid ticket stands among unpaid ones"
        assert sum(one.requests for one in self._of_tenant.values()) == len(self), "tenants' requests do not add up"
        assert sum(one.tokens for one in self._of_tenant.values()) == self._backlog.tokens, "tokens do not add up"
        assert all(one.requests for one in self._of_tenant.values()), "a tenant is kept that has nothing waiting"

    def _require_new(self, ticket: Ticket) -> None:
        if ticket.id in self._waiting or ticket.id in self._charged:
            raise ValueError(f"'{ticket.id}' waits already or was charged and not corrected yet")

    def _queue(self, name: str) -> TenantQueues:
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = TenantQueues(self._weights)
            account = Account(1.0, self._turns.clock.reached)
            self._turns.standings[name] = Standing(name, self._last_rank, 0.0, account)
        return queue

    def _backlogged(self) -> set[str]:
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
