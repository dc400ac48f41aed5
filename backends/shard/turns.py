"""Turns: long work in pieces, so that the event loop does everything else in between."""

from __future__ import annotations

import asyncio


class Turns:
    """One piece at a time: a hundred workers with long work delay others by one piece, not by a hundred.

    First come, first served.
    """

    def __init__(self) -> None:
        self._next = asyncio.Lock()

    async def take(self) -> None:
        """Return when it is the caller's turn: everything else has run since the last one."""
        # held across one round of the loop on purpose
        async with self._next:
            await asyncio.sleep(0)
