"""The Protocol of every quota store."""

from __future__ import annotations

import enum
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from policies.quota.budget import Charge, Descriptor, Refused, Reservation, Standing
from router.shared.store.debts import Debt


class Fault(enum.StrEnum):
    """What is wrong with a store. A metric label."""

    SLOW = "slow"
    GONE = "gone"
    FULL = "full"
    REFUSING = "refusing"
    NONSENSE = "nonsense"


class StoreFailed(Exception):
    """The store did not do it, or it is unknown whether it did."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(f"{fault}: {message}")
        self.fault = fault


class QuotaStore(Protocol):
    """Reserves before a request runs, settles after; at most once each, by the reservation's id.

    All descriptors of one call are in one ledger. Every method but `close` may raise StoreFailed; then the call may
    have happened or not, and repeating it with the same id is safe for `policies.quota.ledger.KEPT_S`.
    """

    def reserve(self, asked: Reservation) -> Reservation | Refused | Coroutine[Any, Any, Reservation | Refused]:
        """Reserve `asked` from all its descriptors, or nothing. The result tells what is left; where another program
        counts, it comes from what is to be awaited.
        """
        ...

    def settle(self, reservation: Reservation, charge: Charge) -> object:
        """Charge the actual use instead of the reservation, of the same descriptors. No call waits for it or reads what
        it returns.
        """
        ...

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        """Renew the leases of running requests. An empty list only proves that the store takes what is written."""
        ...

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        """What is left of `descriptors`. Reserves nothing."""
        ...

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]:
        """The present levels of the meters of `descriptors`, in their order. Reserves nothing."""
        ...

    async def start(self) -> None:
        """Get ready. Returns soon, even if the server behind the store is away."""
        ...

    async def close(self) -> None:
        """Close connections. Open reservations stay until they lapse."""
        ...


class SharedStore(Protocol):
    """A store in another program. A router may lose it for a while, and then admits requests by itself.

    Its methods do what those of QuotaStore do, once they are awaited.
    """

    async def reserve(self, asked: Reservation) -> Reservation | Refused: ...

    async def settle_all(self, debts: Sequence[Debt]) -> None:
        """Settle each of these, in one round trip; where it fails, some of them. A debt that it has counts once, though
        it comes again days later."""
        ...

    async def grant(self, reservation: Reservation) -> None:
        """Take a reservation that the router has granted by itself, into debt if necessary."""
        ...

    async def renew(self, reservations: Sequence[Reservation]) -> None: ...

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing: ...

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]: ...

    async def hang_up(self) -> None:
        """Use no connection again that is open now: another server may be behind the same address."""
        ...

    async def close(self) -> None: ...
