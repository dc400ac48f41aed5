"""The way in: counts the calls inside, and can be closed so that the router empties."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from policies.errors import Overloaded


class Doors:
    """Open until `close()`. A call is inside from `entered()` until that context is left, however it ends."""

    def __init__(self) -> None:
        self.inside, self.open = 0, True
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"<Doors {'open' if self.open else 'closed'}, {self.inside} inside>"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside. Raises Overloaded once the doors are closed."""
        if not self.open:
            hint = "try again: another replica may take it"
            raise Overloaded("the router is shutting down", hint=hint, retry_after_s=1.0)
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._empty.set()

    def close(self) -> None:
        """Let nobody in any more; who is inside stays."""
        self.open = False

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until nobody is inside, at most `timeout_s`; was it so?"""
        if self.inside:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()
        return not self.inside

    def check(self) -> None:
        """Nobody is counted wrong; for use at any time."""
        assert self.inside >= 0, f"{self!r}: more calls left than came"
        assert self._empty.is_set() == (self.inside == 0), f"{self!r}: the event does not fit the count"
