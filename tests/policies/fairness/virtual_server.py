"""A server of k slots on a virtual clock that is fed from a fair queue, and the builders of its tests."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from policies.fairness.queue import FairQueue
from policies.fairness.ticket import Ticket
from policies.nouns import ServiceClass

NUMBERS = count()


def a_ticket(tenant: str = "acme", service_class: str = "standard", **what: Any) -> Ticket:
    values: dict[str, Any] = {"id": f"t{next(NUMBERS)}", "cost_s": 1.0, "arrived_at": 0.0, "tokens": 100}
    return Ticket(tenant=tenant, service_class=service_class, **{**values, **what})


def some_classes(*classes: ServiceClass) -> dict[str, ServiceClass]:
    return {service_class.name: service_class for service_class in classes or (ServiceClass("standard", 0),)}


def a_queue(*classes: ServiceClass, ageing_s: float = 1e9, **weights: float) -> FairQueue:
    return FairQueue(some_classes(*classes), weights, ageing_s)


def drain(queue: FairQueue, now: float = 0.0) -> list[Ticket]:
    """All tickets, each taken when it is its turn."""
    taken = []
    while queue:
        taken.append(queue.take(next(queue.order(now)).id, now))
    return taken


class VirtualServer:
    """Runs up to `slots` tickets at once, each for `actual_s(ticket)`, and corrects them when they end.

    `arrive` is asked before every choice which tickets have come by now. `served` counts seconds by tenant and by
    class, `taken` is (when, ticket) in order.
    """

    def __init__(
        self,
        queue: FairQueue,
        slots: int,
        arrive: Callable[[float], list[Ticket]],
        actual_s: Callable[[Ticket], float] = lambda ticket: ticket.cost_s,
    ) -> None:
        self.queue, self.slots, self._arrive, self._actual_s = queue, slots, arrive, actual_s
        self.now, self.taken = 0.0, list[tuple[float, Ticket]]()
        self.served: Counter[str] = Counter()
        self._running: list[tuple[float, int, Ticket]] = []

    def run(self, seconds: float) -> None:
        """Until the clock shows `seconds`."""
        while self.now < seconds:
            for ticket in self._arrive(self.now):
                self.queue.push(ticket, self.now)
            while len(self._running) < self.slots and self.queue:
                ticket = self.queue.take(next(self.queue.order(self.now)).id, self.now)
                self.taken.append((self.now, ticket))
                heapq.heappush(self._running, (self.now + self._actual_s(ticket), next(NUMBERS), ticket))
            self.now, _, ticket = heapq.heappop(self._running)
            self.queue.correct(ticket, self._actual_s(ticket), self.now)
            self.served[ticket.tenant] += self._actual_s(ticket)  # type: ignore[assignment]
            self.served[ticket.service_class] += self._actual_s(ticket)  # type: ignore[assignment]
        self.queue.check()


def jain(shares: list[float]) -> float:
    """Jain's index: 1 if all are equal, 1/n if one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
