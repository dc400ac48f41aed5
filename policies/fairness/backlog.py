"""Backlog: the amount of work that waits."""

from __future__ import annotations

from dataclasses import dataclass

from policies.fairness.ticket import Ticket


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
