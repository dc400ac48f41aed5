"""Walk: the order in which the tickets of one class will be served, read ahead without taking any."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from policies.fairness.tenants import TenantQueues
from policies.fairness.ticket import Ticket


class Walk:
    """The order in which `TenantQueues` would serve its tickets if each were taken in its turn. Changes nothing there.

    A step costs the logarithm of the steps so far: the tenants are in order already, and after its ticket was passed
    a tenant moves to the place of its next ticket. Valid until the queues change.
    """

    def __init__(self, queues: TenantQueues) -> None:
        self._queues = queues
        self._first = 0
        self._passed: list[tuple[float, int, str]] = []
        self._tickets: dict[str, Iterator[Ticket]] = {}
        self._reached, self._moves = queues.clock.reached, queues.moves
        self._arrivals = iter(queues.arrivals.values())
        self._fresh = next(self._arrivals, None)
        self._back = 0
        self._seen: set[str] = set()

    @property
    def oldest_at(self) -> float | None:
        """The arrival of the oldest ticket that no step has passed; None after the last."""
        while self._fresh is not None and self._fresh.id in self._seen:
            self._fresh = next(self._arrivals, None)
        fresh = None if self._fresh is None else self._fresh.arrived_at
        if self._back == len(self._queues.returned_order):
            return fresh
        back = self._queues.returned_order[self._back][0]
        return back if fresh is None else min(back, fresh)

    def step(self) -> tuple[Ticket, bool]:
        """The next ticket, and True if it is paid for. Raises IndexError after the last."""
        if self._back < len(self._queues.returned_order):
            _, name = self._queues.returned_order[self._back]
            self._back += 1
            return self._queues.returned[name], True
        ticket = self._next_fresh()
        self._seen.add(ticket.id)
        return ticket, False

    def _next_fresh(self) -> Ticket:
        places, passed = self._queues.places, self._passed
        if passed and (self._first == len(places) or passed[0] < places[self._first]):
            tag, _, name = heappop(passed)
        else:
            tag, _, name = places[self._first]
            self._first += 1
            self._tickets[name] = iter(self._queues.tenants[name].tickets.values())
        ticket = next(self._tickets[name])
        self._pass(name, tag, ticket)
        return ticket

    def _pass(self, name: str, tag: float, ticket: Ticket) -> None:
        """Move the tenant to the place that `VirtualTime.serve` would give it, if it has another ticket."""
        queue = self._queues.tenants[name]
        start = max(tag, self._reached - self._queues.clock.slack_s)
        self._reached, self._moves = max(self._reached, start), self._moves + 1
        if ticket is not next(reversed(queue.tickets.values())):
            heappush(self._passed, (start + ticket.cost_s / queue.account.weight, self._moves, name))
