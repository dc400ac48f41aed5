"""Quotas in this process: enough for one router."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.quota.budget import Descriptor, Reservation, Standing
from policies.quota.ledger import Ledger

KEPT_S = 1.0
"""How long settled reservations are remembered: no message comes twice, and there may be thousands in a second."""


class MemoryStore:
    """A Ledger in memory. No reservation lapses: its holder dies with the ledger. `clock` is Unix time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ledger = ledger = Ledger(kept_s=KEPT_S, clock=clock)
        # every request reserves and settles: without a call in between
        self.reserve, self.settle = ledger.reserve, ledger.settle

    def __repr__(self) -> str:
        return f"<MemoryStore {self._ledger!r}>"

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        """See QuotaStore."""
        self._ledger.renew([reservation.id for reservation in reservations], now=self._clock())

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        """See QuotaStore."""
        return self._ledger.standing(descriptors, now=self._clock())

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]:
        """See QuotaStore."""
        return self._ledger.levels(descriptors, now=self._clock())

    async def start(self) -> None:
        """See QuotaStore."""

    async def close(self) -> None:
        """See QuotaStore."""

    def check(self) -> None:
        """The ledger balances."""
        self._ledger.check()
