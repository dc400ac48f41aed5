"""Ticket: one request as the fair queue sees it."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

import msgspec


class Ticket(msgspec.Struct, frozen=True):
    """A request that waits, or could wait, for a backend.

    `cost_s` is the backend time that it is predicted to use, and `arrived_at` its arrival by the clock, in seconds.
    Tickets of equal `shape` need the same kind of room; the queue passes the shape on without reading it. Raises
    ValueError for a cost that is not a finite number of seconds.
    """

    id: str
    tenant: str
    service_class: str
    cost_s: float
    arrived_at: float
    shape: Hashable = None
    tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cost_s < inf:
            raise ValueError(f"a ticket must cost a finite number of seconds, not {self.cost_s}")
