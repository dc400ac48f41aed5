"""Backlog: how much waits."""

from __future__ import annotations

from dataclasses import dataclass

from policies.fairness.ticket import Ticket


@dataclass(slots=True)
class Backlog:
    """Requests that wait, the tokens in them and the predicted seconds of a backend that they will use."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, ticket: Ticket) -> None:
        """One more waits."""
        self.requests += 1
        self.tokens += ticket.tokens
        self.seconds += ticket.cost_s

    def subtract(self, ticket: Ticket) -> None:
        """One less waits."""
        self.requests -= 1
        self.tokens -= ticket.tokens
        # rounding: never below 0, and at exactly 0 when nothing waits, so that it does not add up over busy periods
        self.seconds = max(0.0, self.seconds - ticket.cost_s) if self.requests else 0.0
