"""The tickets of one class: which tenant is served next, by start-time fair queueing, and which ticket of it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose

from policies.fairness.ticket import Backlog, Ticket

DEBT_HALF_LIFE_S = 60.0
"""Time in which an idle account loses half of its debt, the service that it had beyond the others."""

MOST_DEBT_S = 600.0
"""The largest debt, in seconds of service, that an account keeps when it comes back. Longer than any request."""


@dataclass(slots=True)
class Account:
    """One participant. `tag` is the virtual time at which its next service starts, in seconds per weight.

    `touched_at` is its last use by the caller's clock; while the account is idle, its debt fades from then on.
    """

    weight: float
    tag: float = 0.0
    touched_at: float = 0.0


@dataclass(slots=True)
class VirtualTime:
    """Start-time fair queueing with corrections and bounded memory.

    The account with the lowest tag is served next; `seconds` of service move its tag on by seconds / weight. `reached`
    is the latest tag at which service has started. An account that begins to wait starts at `reached`, so that idle
    time earns no credit, or later if it still has a debt. An account that waits but is passed over keeps its lead over
    the accounts that are served, up to `slack_s` (per weight of 1).

    For any two accounts that wait all the time and are not passed over, seconds / weight differ by at most the sum of
    their largest single costs, each divided by its weight, over any interval (Goyal, Vin, Cheng: Start-time Fair
    Queueing, SIGCOMM '96, theorem 1). Wrong predictions add the amount that is not yet corrected.
    """

    slack_s: float = 0.0
    reached: float = 0.0

    def start(self, account: Account) -> float:
        """The virtual time at which the next service of `account`, which waits, starts."""
        return max(account.tag, self.reached - self.slack_s)

    def serve(self, account: Account, seconds: float, now: float) -> None:
        """Give `account`, which waits, `seconds` of service."""
        start = max(account.tag, self.reached - self.slack_s)
        self.reached = max(self.reached, start)
        account.tag, account.touched_at = start + seconds / account.weight, now

    def wake(self, account: Account, now: float) -> None:
        """Bring an idle account back: without credit, and with the rest of its debt."""
        self.fade(account, now)
        account.tag = max(account.tag, self.reached)

    def fade(self, account: Account, now: float) -> None:
        """Reduce the debt of an idle account by the time since it was touched."""
        debt = account.tag - self.reached
        if debt > 0:
            left = 0.5 ** (max(0.0, now - account.touched_at) / DEBT_HALF_LIFE_S)
            account.tag = self.reached + min(debt, MOST_DEBT_S / account.weight) * left
        account.touched_at = now


SLACK_S = 60.0
"""Lead that a tenant keeps while backends have no room for what it sends: about one long prompt's prefill."""

Place = tuple[float, int, str]
"""Position of a tenant among the waiting tenants: its tag, the number of its last move, its name. The least is next."""


@dataclass(slots=True)
class TenantQueue:
    """The tickets of one tenant in one class, first in, first out. `place` is None exactly while there is none."""

    account: Account
    # a dict searches longer for its first entry the more entries were deleted before it; an OrderedDict does not
    tickets: OrderedDict[str, Ticket] = field(default_factory=OrderedDict)
    backlog: Backlog = field(default_factory=Backlog)
    place: Place | None = None


class TenantQueues:
    """One FIFO per tenant, served in the order of the tenants' virtual times.

    Tickets that come back from a failed backend are paid for: they are served before all others, oldest first.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.backlog, self.returned_backlog = Backlog(), Backlog()
        self.clock = VirtualTime(SLACK_S)
        self.tenants: dict[str, TenantQueue] = {}
        self.places: list[Place] = []
        self.arrivals: OrderedDict[str, Ticket] = OrderedDict()
        self.returned: dict[str, Ticket] = {}
        self.returned_order: list[tuple[float, str]] = []
        self.moves = 0
        self._weights = weights
        self._waiting_weight = 0.0

    def __len__(self) -> int:
        return self.backlog.requests

    @property
    def oldest_at(self) -> float | None:
        """The arrival of the ticket that has waited longest; None if no ticket waits."""
        fresh = next(iter(self.arrivals.values())).arrived_at if self.arrivals else None
        if not self.returned_order:
            return fresh
        back = self.returned_order[0][0]
        return back if fresh is None else min(back, fresh)

    def push(self, ticket: Ticket, now: float) -> None:
        """Let `ticket` wait behind the other tickets of its tenant."""
        queue = self.tenants.get(ticket.tenant) or self._joined(ticket.tenant)
        if queue.place is None:
            self.clock.wake(queue.account, now)
            self._enter(ticket.tenant, queue)
            self._waiting_weight += queue.account.weight
        queue.tickets[ticket.id] = self.arrivals[ticket.id] = ticket
        queue.backlog.add(ticket)
        self.backlog.add(ticket)

    def push_front(self, ticket: Ticket) -> None:
        """Let `ticket`, which is paid for, wait before all tickets that are not."""
        self.returned[ticket.id] = ticket
        insort(self.returned_order, (ticket.arrived_at, ticket.id))
        self.returned_backlog.add(ticket)
        self.backlog.add(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Take `ticket` out of the queue without a charge."""
        self.backlog.subtract(ticket)
        if self.returned.pop(ticket.id, None):
            del self.returned_order[bisect_left(self.returned_order, (ticket.arrived_at, ticket.id))]
            self.returned_backlog.subtract(ticket)
            return
        queue = self.tenants[ticket.tenant]
        del queue.tickets[ticket.id], self.arrivals[ticket.id]
        queue.backlog.subtract(ticket)
        if not queue.tickets:
            self._leave(queue)
            self._waiting_weight = self._waiting_weight - queue.account.weight if self.places else 0.0

    def take(self, ticket: Ticket, now: float) -> None:
        """Take `ticket` out of the queue to serve it, and charge its tenant unless it is paid for."""
        if ticket.id not in self.returned:
            queue = self.tenants[ticket.tenant]
            self.clock.serve(queue.account, ticket.cost_s, now)
            if len(queue.tickets) > 1:
                self._replace(ticket.tenant, queue)
        self.remove(ticket)

    def charge(self, ticket: Ticket, now: float) -> None:
        """Charge the tenant of `ticket`, which is served without having waited: no other account waits for it.

        It counts, so that a burst into an idle system is not free once other accounts come. But only the last `slack_s`
        and the last cost of all such service count, so that the debt for service that no other account wanted is paid
        off soon.
        """
        queue, clock = self.tenants.get(ticket.tenant) or self._joined(ticket.tenant), self.clock
        account = queue.account
        if queue.place is None:
            clock.fade(account, now)
        start = max(account.tag, clock.reached)
        clock.reached = max(clock.reached, start - clock.slack_s)
        account.tag, account.touched_at = start + ticket.cost_s / account.weight, now
        if queue.place is not None:
            self._replace(ticket.tenant, queue)

    def correct(self, tenant: str, seconds: float, now: float) -> None:
        """Correct the account of `tenant`, which used `seconds` more than it was charged; fewer if negative."""
        queue = self.tenants.get(tenant) or self._joined(tenant)
        if queue.place is None:
            self.clock.fade(queue.account, now)
        # the tag is now the same as after an exact prediction: debt behind virtual time is forgotten in both cases
        queue.account.tag += seconds / queue.account.weight
        if queue.place is not None:
            self._replace(tenant, queue)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Replace the tenants' weights. A tenant without one has weight 1 and is forgotten when idle."""
        self._weights = weights
        self.tenants = {name: queue for name, queue in self.tenants.items() if queue.tickets or name in weights}
        for name, queue in self.tenants.items():
            queue.account.weight = weights.get(name, 1.0)
        self._waiting_weight = sum(queue.account.weight for queue in self.tenants.values() if queue.tickets)

    def ahead_s(self, tenant: str) -> float:
        """Estimated seconds of this class that are served before a new ticket of `tenant`, without later arrivals.

        Returned tickets come first, then the tenant's own. Meanwhile each other tenant gets its share, or one ticket if
        it is placed before this tenant, as far as the other tenants together have work.
        """
        queue = self.tenants.get(tenant) or TenantQueue(Account(self._weights.get(tenant, 1.0)))
        account, own_s = queue.account, queue.backlog.seconds
        tag = account.tag if queue.tickets else max(account.tag, self.clock.reached)
        start = tag + own_s / account.weight
        fresh_s = self.backlog.seconds - self.returned_backlog.seconds
        weight = self._waiting_weight - (account.weight if queue.tickets else 0.0)
        before = bisect_left(self.places, (start, self.moves + 1, "")) - (1 if queue.tickets else 0)
        one_each_s = before * fresh_s / max(1, len(self.arrivals))
        others_s = max(0.0, start - self.clock.reached) * weight
        return self.returned_backlog.seconds + own_s + max(0.0, min(fresh_s - own_s, max(others_s, one_each_s)))

    def check(self) -> None:
        """Assert that places, queues and sums agree."""
        assert self.places == sorted(self.places), "tenants stand in the wrong order"
        placed = {name: queue.place for name, queue in self.tenants.items() if queue.place is not None}
        assert {place[2]: place for place in self.places} == placed, "a tenant has no place, or two"
        assert len(self.places) == len(placed), "a tenant stands in two places"
        assert placed.keys() == {name for name, queue in self.tenants.items() if queue.tickets}, "a place is not used"
        fresh = [ticket for queue in self.tenants.values() for ticket in queue.tickets.values()]
        assert {ticket.id for ticket in fresh} == set(self.arrivals), "a ticket is in no queue, or in two"
        assert not self.returned.keys() & self.arrivals.keys(), "a ticket waits twice"
        assert self.returned_order == sorted((ticket.arrived_at, name) for name, ticket in self.returned.items())
        for queue in self.tenants.values():
            assert queue.place is None or queue.place[0] == queue.account.tag, "a tenant's place has an old tag"
            _check_backlog(queue.backlog, list(queue.tickets.values()))
        _check_backlog(self.backlog, fresh + list(self.returned.values()))
        _check_backlog(self.returned_backlog, list(self.returned.values()))
        weight = sum(queue.account.weight for queue in self.tenants.values() if queue.tickets)
        assert isclose(self._waiting_weight, weight, abs_tol=1e-6), "the weights of the waiting tenants do not add up"

    def _joined(self, name: str) -> TenantQueue:
        """An empty queue for the tenant `name`, which has none yet."""
        queue = self.tenants[name] = TenantQueue(Account(self._weights.get(name, 1.0), self.clock.reached))
        return queue

    def _replace(self, name: str, queue: TenantQueue) -> None:
        """Move a tenant that waits to the place of its present tag."""
        self._leave(queue)
        self._enter(name, queue)

    def _enter(self, name: str, queue: TenantQueue) -> None:
        self.moves += 1
        queue.place = (queue.account.tag, self.moves, name)
        insort(self.places, queue.place)

    def _leave(self, queue: TenantQueue) -> None:
        if queue.place is not None:
            del self.places[bisect_left(self.places, queue.place)]
        queue.place = None


def _check_backlog(backlog: Backlog, tickets: list[Ticket]) -> None:
    assert backlog.requests == len(tickets), "requests are miscounted"
    assert backlog.tokens == sum(ticket.tokens for ticket in tickets), "tokens are miscounted"
    seconds = sum(ticket.cost_s for ticket in tickets)
    assert isclose(backlog.seconds, seconds, rel_tol=1e-6, abs_tol=1e-6), "seconds do not add up"
