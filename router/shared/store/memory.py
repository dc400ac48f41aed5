"""Quotas in this process: enough for one router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from policies.quota.budget import Charge, Descriptor, Reservation, Settlement, Standing
from policies.quota.ledger import Ledger, MeterLevel
from router.shared.store.levels_file import LevelsFile
from router.shared.store.levels_journal import LevelsJournal
from router.shared.store.levels_keeper import LevelsKeeper

KEPT_S = 1.0
"""How long settled reservations are remembered: no message comes twice, and there may be thousands in a second."""

_AT_ONCE = 1000
"""Levels that are collected between two turns of the event loop."""


class MemoryStore:
    """A Ledger in memory. No reservation lapses: its holder dies with the ledger. `clock` is Unix time.

    With a `file` it goes on from the levels there, and keeps them there, what was settled last in a journal beside it;
    `on_event` is as for LevelsKeeper.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        file: LevelsFile | None = None,
        *,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._ledger = ledger = Ledger(kept_s=KEPT_S, clock=clock)
        # every request reserves and settles: without a call in between
        self.reserve = ledger.reserve
        self.settle: Callable[[Reservation, Charge], Settlement] = ledger.settle
        self.keeper: LevelsKeeper | None = None
        if file is not None:
            self._journal = journal = LevelsJournal(file.path)
            self.settle = self._settle_and_keep
            self.keeper = LevelsKeeper(
                file, resume=self._resume, reads=self._levels, journal=journal, on_event=on_event
            )

    def __repr__(self) -> str:
        return f"<MemoryStore {self._ledger!r}>"

    async def renew(self, reservations: Sequence[Reservation]) -> None:
        self._ledger.renew([reservation.id for reservation in reservations], now=self._clock())

    async def standing(self, descriptors: Sequence[Descriptor]) -> Standing:
        return self._ledger.standing(descriptors, now=self._clock())

    async def levels(self, descriptors: Sequence[Descriptor]) -> Sequence[int]:
        return self._ledger.levels(descriptors, now=self._clock())

    async def start(self) -> None:
        """See QuotaStore. No request is admitted before the levels of the file are known."""
        if self.keeper is not None:
            await self.keeper.start()

    async def close(self) -> None:
        """See QuotaStore. Keeps what was used."""
        if self.keeper is not None:
            await self.keeper.close()

    def check(self) -> None:
        """The ledger balances."""
        self._ledger.check()

    def _settle_and_keep(self, reservation: Reservation, charge: Charge) -> Settlement:
        settlement = self._ledger.settle(reservation, charge)
        if self._journal.is_open:
            self._journal.add(self._ledger.settled_of(reservation.descriptors))
        return settlement

    async def _resume(self, levels: Sequence[MeterLevel]) -> None:
        self._ledger.resume(levels, now=self._clock())

    async def _levels(self) -> list[MeterLevel]:
        """Those of the ledger. One end user may have a meter, and there are very many."""
        found = []
        for level in self._ledger.settled_levels():
            found.append(level)
            if not len(found) % _AT_ONCE:
                await asyncio.sleep(0)
        return found
