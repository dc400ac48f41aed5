"""The way in: counts the calls inside, and can be closed so that the router empties."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from policies.errors import CutOff, Unavailable

_RETRY_AFTER_S = 1.0


class Doors:
    """Open until `close()`. A call is inside from `entered()` until that context is left, however it ends."""

    def __init__(self) -> None:
        self.open = True
        self._inside: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"<Doors {'open' if self.open else 'closed'}, {self.inside} inside>"

    @property
    def inside(self) -> int:
        """How many calls are inside."""
        return len(self._inside)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Be inside. Raises Unavailable once the doors are closed, CutOff when all were turned out."""
        if not self.open:
            hint = "try again: another replica may take it"
            raise Unavailable("the router is shutting down", hint=hint, retry_after_s=_RETRY_AFTER_S)
        stay = asyncio.timeout(None)
        self._inside.add(stay)
        self._empty.clear()
        try:
            async with stay:
                yield
        except TimeoutError as error:
            if not stay.expired():
                raise
            hint = "ask again: another replica may answer"
            raise CutOff(
                "the router shut down before this answer ended", hint=hint, retry_after_s=_RETRY_AFTER_S
            ) from error
        finally:
            self._inside.discard(stay)
            if not self._inside:
                self._empty.set()

    def close(self) -> None:
        """Let no more calls in; those inside stay."""
        self.open = False

    def turn_out(self) -> None:
        """End all calls that are inside now."""
        now = asyncio.get_running_loop().time()
        for stay in self._inside:
            if not stay.expired():
                stay.reschedule(now)

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until no call is inside, at most `timeout_s`; returns whether none is."""
        if self.inside:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()
        return not self.inside

    def check(self) -> None:
        """Assert that the counts agree; may be called at any time."""
        assert self._empty.is_set() == (self.inside == 0), f"{self!r}: the event does not fit the count"
