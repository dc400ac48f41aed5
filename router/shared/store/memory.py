"""Quotas in this process: enough for one router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from policies.quota.budget import Descriptor, Reservation, Standing
from policies.quota.ledger import Ledger, MeterLevel
from router.shared.store.levels_file import LevelsFile, LevelsUnkept
from router.supervise import supervise

KEPT_S = 1.0
"""How long settled reservations are remembered: no message comes twice, and there may be thousands in a second."""

SAVE_EVERY_S = 1.0
"""Longest time for which a budget of a router that is killed is forgotten."""

_AT_ONCE = 1000
"""Levels that are collected between two turns of the event loop."""

_log = logging.getLogger("pointsman.quotas")


class MemoryStore:
    """A Ledger in memory. No reservation lapses: its holder dies with the ledger. `clock` is Unix time.

    With a `file` it goes on from the levels there, and keeps them there. While another router has the file, or it
    cannot be written, this one counts alone, and adds the levels once it has the file: `on_event` gets
    `budgets_unkept` and `budgets_kept`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        file: LevelsFile | None = None,
        *,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock, self._file, self._on_event = clock, file, on_event
        self._ledger = ledger = Ledger(kept_s=KEPT_S, clock=clock)
        # every request reserves and settles: without a call in between
        self.reserve, self.settle = ledger.reserve, ledger.settle
        self._trouble: str | None = None
        self._task: asyncio.Task[None] | None = None

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
        """See QuotaStore. No request is admitted before the levels of the file are known."""
        if self._file is not None:
            await self._keep()
            self._task = asyncio.create_task(supervise("budgets", self._keep_on))

    async def close(self) -> None:
        """See QuotaStore. Keeps what was used."""
        if self._file is None or self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._keep()
        await asyncio.to_thread(self._file.close)

    def check(self) -> None:
        """The ledger balances."""
        self._ledger.check()

    async def _keep_on(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self._keep()

    async def _keep(self) -> None:
        """Have the file, and the levels in it; note if that fails."""
        assert self._file is not None
        try:
            if not self._file.is_open:
                self._ledger.resume(await asyncio.to_thread(self._file.open), now=self._clock())
            await asyncio.to_thread(self._file.save, await self._levels())
        except LevelsUnkept as trouble:
            self._note(str(trouble))
        else:
            self._note(None)

    async def _levels(self) -> list[MeterLevel]:
        """Those of the ledger. One end user may have a meter, and there are very many."""
        found = []
        for level in self._ledger.settled_levels():
            found.append(level)
            if not len(found) % _AT_ONCE:
                await asyncio.sleep(0)
        return found

    def _note(self, trouble: str | None) -> None:
        """Log a change of the trouble; what no limit counts needs no file."""
        if trouble is not None and self._trouble is None:
            with suppress(StopIteration):
                next(self._ledger.settled_levels())
                self._trouble = trouble
                self._on_event("budgets_unkept")
                _log.warning("budgets are not kept, and those of this router end with it: %s", trouble)
        elif trouble is None and self._trouble is not None:
            self._trouble = None
            self._on_event("budgets_kept")
            _log.info("budgets are kept again")
