"""The Protocol of every quota store."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from policies.quota.budget import Charge, Descriptor, Refused, Reservation, Standing


class Fault(enum.StrEnum):
    """What is wrong with a store. A metric label."""

    SLOW = "slow"
    GONE = "gone"
    FULL = "full"
    REFUSING = "refusing"
    NONSENSE = "nonsense"


class StoreFailed(Exception):
    """The store did not do what it was asked, or nobody knows whether it did."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(f"{fault}: {message}")
        self.fault = fault


class QuotaStore(Protocol):
    """Reserves before a request runs, settles after; at most once each, by the reservation's id.

    All descriptors of one call belong to one tenant. Everything but `close` may raise StoreFailed, and then it may or
    may not have happened: calling again with the same id is safe for `policies.quota.ledger.KEPT_S`.
    """

    async def reserve(self, asked: Reservation) -> Reservation | Refused:
        """Take what is `asked` from all its descriptors, or nothing. What comes back says what is left."""
        ...

    async def settle(self, reservation: Reservation, charge: Charge) -> None:
        """Charge what was really used instead of what was reserved. The same descriptors as in `reserve`."""
        ...

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        """Their requests still run: the leases begin anew. With none, it only proves that the store answers."""
        ...

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        """What is left to `descriptors`. Takes nothing."""
        ...

    async def start(self) -> None:
        """Make ready. Returns soon, also when what is behind the store is away."""
        ...

    async def close(self) -> None:
        """Let go of connections. What is open stays reserved until it lapses."""
        ...
