"""Runs the steps of a simulated engine on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from shards.nouns import Submission
from shards.sched.limits import Refusal
from simulation.engine import Drew, SimulatedEngine


@dataclass(slots=True)
class Unread:
    """The pieces of one answer that its reader has not taken."""

    _drawn: deque[Drew] = field(default_factory=deque)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, drew: Drew) -> None:
        """Append a piece."""
        self._drawn.append(drew)
        self._came.set()

    async def take(self) -> Drew:
        """The next piece; waits for it."""
        if not self._drawn:
            self._came.clear()
            await self._came.wait()
        return self._drawn.popleft()


def _unchanged(at_s: float) -> float:
    return at_s


class Driver:
    """Begins and ends the steps of `engine` at their times, and hands its tokens to the readers of answers.

    `clock` gives the engine's seconds, and `loop_s` the event loop's time of such a moment. `on_step` is called after
    each step, before the readers' tasks run. A step begins when the one before it ended, even if the loop noticed late.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        *,
        clock: Callable[[], float],
        on_step: Callable[[], None],
        loop_s: Callable[[float], float] = _unchanged,
    ) -> None:
        self.engine = engine
        self._clock, self._on_step, self._loop_s = clock, on_step, loop_s
        self._inboxes: dict[Hashable, Unread] = {}
        self._timer: asyncio.Handle | None = None

    def submit(self, submission: Submission, token_ids: bytes, *, new_tokens: int) -> Unread | Refusal:
        """Add a request with an answer of `new_tokens`; returns its pieces, or the reason of its rejection."""
        refusal = self.engine.submit(submission, token_ids, new_tokens=new_tokens, now_s=self._clock())
        if refusal is not None:
            return refusal
        inbox = self._inboxes[submission.key] = Unread()
        self._reschedule()
        return inbox

    def leave(self, key: Hashable) -> None:
        """Its reader reads no more: cancel the request if it is not over."""
        del self._inboxes[key]
        if self.engine.cancel(key, self._clock()):
            self._reschedule()

    def close(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Assert the engine's invariants, and that it has no requests without a reader."""
        self.engine.check()
        assert self.engine.has_requests == bool(self._inboxes), f"{self.engine!r} has requests without a reader"

    def _reschedule(self) -> None:
        """Set the timer for the end of the running step, or for a step at once, with all requests of this moment."""
        self.close()
        loop, ends_s = asyncio.get_running_loop(), self.engine.ends_s
        self._timer = loop.call_soon(self._go_on) if ends_s is None else loop.call_at(self._loop_s(ends_s), self._go_on)

    def _go_on(self) -> None:
        """End a step and begin the next."""
        self._timer = None
        now_s = self.engine.ends_s
        if now_s is None:
            now_s = self._clock()
        else:
            for drew in self.engine.end():
                inbox = self._inboxes.get(drew.key)
                if inbox is not None:
                    inbox.put(drew)
            self._on_step()
        ends_s = self.engine.begin(now_s)
        wakes_s = self.engine.next_change_s if ends_s is None else ends_s
        if wakes_s is not None:
            self._timer = asyncio.get_running_loop().call_at(self._loop_s(wakes_s), self._go_on)
