"""Keeps what was used of budgets in a file, for whichever part counts it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from policies.quota.ledger import MeterLevel
from router.shared.store.levels_file import LevelsFile, LevelsUnkept
from router.shared.store.levels_journal import LevelsJournal
from router.supervise import supervise

KEEP_EVERY_S = 1.0
"""Time between two writes. What was used in it is forgotten if the router is killed and has no journal."""

_SHARE = 20
"""Reading and writing takes at most one in so many seconds."""

_log = logging.getLogger("pointsman.quotas")


class LevelsKeeper:
    """Has the counting part `resume` from the levels of `file`, and writes those that it `reads` there.

    Both raise LevelsUnkept if the part is away. While another router has the file, or it cannot be written, the part
    counts alone, and resumes once the file is ours: `on_event` gets `budgets_unkept` and `budgets_kept`. The part gives
    a `journal` what it settles while that is open: what the file does not have yet, also of a router that was killed.
    """

    def __init__(
        self,
        file: LevelsFile,
        *,
        resume: Callable[[Sequence[MeterLevel]], Awaitable[None]],
        reads: Callable[[], Awaitable[Sequence[MeterLevel]]],
        journal: LevelsJournal | None = None,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._file, self._resume, self._reads, self._on_event = file, resume, reads, on_event
        self._journal = journal
        self._is_in_trouble = False
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<LevelsKeeper {self._file}>"

    async def start(self) -> None:
        """Resume, and go on to keep."""
        await self.keep()
        self._task = asyncio.create_task(supervise("budgets", self._keep_on))

    async def close(self) -> None:
        """Keep what there is, and let another router have the file."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.keep()
        if self._journal is not None:
            self._journal.close()
        await asyncio.to_thread(self._file.close)

    async def keep(self) -> None:
        """Have the file, and the levels in it."""
        try:
            if not self._file.is_open:
                await self._resume(await asyncio.to_thread(self._opened))
            # what is settled from here on may not be among the levels
            past = None if self._journal is None else self._journal.turn()
            await asyncio.to_thread(self._save, await self._reads(), past)
        except LevelsUnkept as trouble:
            if self._journal is not None and not self._file.is_open:
                self._journal.close()
            await self._note(trouble)
            return
        if self._is_in_trouble:
            self._is_in_trouble = False
            self._on_event("budgets_kept")
            _log.info("budgets are kept again")

    def _opened(self) -> Sequence[MeterLevel]:
        kept = self._file.open()
        if self._journal is None:
            return kept
        return list(
            ({level.id: level for level in kept} | {level.id: level for level in self._journal.read()}).values()
        )

    def _save(self, levels: Sequence[MeterLevel], past: int | None) -> None:
        self._file.save(levels)
        if self._journal is not None and past is not None:
            self._journal.forget(past)

    async def _note(self, trouble: LevelsUnkept) -> None:
        if self._is_in_trouble:
            return
        with suppress(LevelsUnkept):
            # what no limit counts needs no file
            if not await self._reads():
                return
        self._is_in_trouble = True
        self._on_event("budgets_unkept")
        _log.warning("budgets are not kept, and those of this router end with it: %s", trouble)

    async def _keep_on(self) -> None:
        took_s = 0.0
        while True:
            await asyncio.sleep(max(KEEP_EVERY_S, _SHARE * took_s))
            began = time.monotonic()
            await self.keep()
            took_s = time.monotonic() - began
