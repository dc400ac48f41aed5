"""The way in: counts the calls inside, and can be closed so that the router empties."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

import msgspec

from policies.errors import CutOff, Unavailable

_RETRY_AFTER_S = 1.0


class Doors:
    """Open until `close()`. A call is inside from entering its Stay until that is left, however it ends."""

    def __init__(self) -> None:
        self.open = True
        self._inside: set[Stay] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"<Doors {'open' if self.open else 'closed'}, {self.inside} inside>"

    @property
    def inside(self) -> int:
        """How many calls are inside."""
        return len(self._inside)

    def close(self) -> None:
        """Let no more calls in; those inside stay."""
        self.open = False

    def turn_out(self) -> None:
        """End all calls that are inside now."""
        for stay in self._inside:
            stay.end()

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


class Stay(msgspec.Struct, eq=False):
    """One call inside `doors`, as a context manager: entering it raises Unavailable once the doors are closed, leaving
    it CutOff if all were turned out. `end` cancels its task, as asyncio.timeout does it.
    """

    doors: Doors
    _is_ended: bool = False
    _was_cancelling: int = 0
    _task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        task = self._task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        self._was_cancelling, doors = task.cancelling(), self.doors
        if not doors.open:
            hint = "try again: another replica may take it"
            raise Unavailable("the router is shutting down", hint=hint, retry_after_s=_RETRY_AFTER_S)
        if not doors._inside:
            doors._empty.clear()
        doors._inside.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        doors = self.doors
        doors._inside.discard(self)
        if not doors._inside:
            doors._empty.set()
        if not self._is_ended or self._task is None:
            return
        # the client may have left in the same moment
        if self._task.uncancel() <= self._was_cancelling and isinstance(error, asyncio.CancelledError):
            hint = "ask again: another replica may answer"
            message = "the router shut down before this answer ended"
            raise CutOff(message, hint=hint, retry_after_s=_RETRY_AFTER_S) from error

    def end(self) -> None:
        """End the call, once."""
        if not self._is_ended and self._task is not None:
            self._is_ended = True
            self._task.cancel()
