"""One prompt at one backend and, if that is late, at a second one: the first to begin its answer gives all of it.

Source: hedged requests, Dean and Barroso, The Tail at Scale (CACM 2013).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from policies.errors import ExpectedError
from router.call.bid import Placed

_log = logging.getLogger("pointsman.pipeline")


PATIENCE = 2.0
"""A second backend may be predicted to need this many times as long as the first was waited for already: it often has
to compute a prompt that the first holds, and what is late may take much longer."""

LOOK_S = 1.0
"""While it is unknown what is late, it is asked first after so long: the pool learns from other requests meanwhile."""


class Beaten(asyncio.CancelledError):
    """Another backend began its answer first. For the backend that is beaten its request was cancelled."""


class Race:
    """`first` and, where it has not begun its answer after `late_s`, the backend that `find_second` finds, if any; it
    is asked again after twice that time, and so on.

    `attempt` streams the answer from one of them. It calls `lead` before it passes a piece on, and returns why it
    failed if another backend may be tried. `find_second` gets the seconds within which the second has to
    begin by its prediction. `on_won` is called when the second takes the lead.

    The client gets the answer of the `leader`, None until one begins; `placed` is the leader, and before that the
    attempt that is charged if it ends so.
    """

    def __init__(
        self,
        first: Placed,
        attempt: Callable[[Placed, Race], Coroutine[Any, Any, ExpectedError | None]],
        *,
        find_second: Callable[[float], Placed | None],
        on_won: Callable[[Placed], None],
        late_s: float,
    ) -> None:
        self.first = self.placed = first
        self.leader: Placed | None = None
        self._attempt, self._find_second, self._on_won, self._late_s = attempt, find_second, on_won, late_s
        self._second: Placed | None = None
        self._task: asyncio.Task[ExpectedError | None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        second = "no second" if self._second is None else self._second.chosen.name
        return f"<Race of {self.first.chosen.name} and {second}>"

    async def run(self) -> ExpectedError | None:
        """The whole answer; why it failed, if another backend may be tried. Raises what the attempt raises.

        If one fails before any has begun its answer, the other goes on: `first` whatever the second failed with, the
        second where another backend may be tried after `first`.
        """
        self._timer = asyncio.get_running_loop().call_later(self._late_s, self._start_second, self._late_s)
        try:
            try:
                failure = await self._attempt(self.first, self)
            except Beaten:
                failure = None
            goes_on = self.leader is self._second if failure is None else self.leader is not self.first
            if self._second is None or self._task is None or not goes_on:
                return failure
            self.placed = self._second
            return await self._task
        finally:
            await self._end_second()

    def lead(self, placed: Placed) -> None:
        """`placed` is the first with a piece of its answer: the other one is cancelled. Raises Beaten if it is not."""
        if self.leader is not None:
            raise Beaten
        self.leader = self.placed = placed
        if placed is self.first:
            if self._timer is not None:
                self._timer.cancel()
            if self._task is not None:
                self._task.cancel()
        else:
            if self.first.flight.give_up is not None:
                self.first.flight.give_up(Beaten())
            self._on_won(placed)

    def _start_second(self, late_s: float) -> None:
        self._task = asyncio.create_task(self._run_second(late_s), name=f"second of {self.first.bid.request.id}")

    async def _run_second(self, late_s: float) -> ExpectedError | None:
        # a flight that begins here is ended by the attempt: nothing can be cancelled between the two
        while (second := self._find_second(PATIENCE * late_s)) is None:
            await asyncio.sleep(late_s)
            late_s *= 2.0
        self._second = second
        return await self._attempt(second, self)

    async def _end_second(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait((self._task,))
        error = None if self._task.cancelled() else self._task.exception()
        # an expected failure of the one that lost counts for nothing
        if error is not None and self.placed is self.first and not isinstance(error, ExpectedError):
            _log.error("a second request failed by an unplanned exception", exc_info=error)
