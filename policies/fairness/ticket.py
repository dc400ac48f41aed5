"""Ticket: one request as the fair queue sees it; Backlog: the sums over tickets that wait."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import msgspec


class Ticket(msgspec.Struct, frozen=True):
    """A request that waits, or could wait, for a backend.

    `cost_s` is the backend time that it is predicted to use, and `arrived_at` its arrival by the clock, in seconds.
    Tickets of equal `shape` need the same kind of room; the queue passes the shape on without reading it.
    """

    id: str
    tenant: str
    service_class: str
    cost_s: float
    arrived_at: float
    shape: Hashable = None
    tokens: int = 0


@dataclass(slots=True)
class Backlog:
    """Sums over the waiting requests: their count, their tokens, and the backend seconds predicted for them."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, ticket: Ticket) -> None:
        """Add a ticket that starts to wait."""
        self.requests += 1
        self.tokens += ticket.tokens
        self.seconds += ticket.cost_s

    def subtract(self, ticket: Ticket) -> None:
        """Subtract a ticket that no longer waits."""
        self.requests -= 1
        self.tokens -= ticket.tokens
        # rounding: never below 0, and exactly 0 when nothing waits, so that errors do not add up over busy periods
        self.seconds = max(0.0, self.seconds - ticket.cost_s) if self.requests else 0.0
