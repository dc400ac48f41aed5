"""How a prompt gets to the backend that was chosen for it, and its answer back, unless the backend is given up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable
from types import TracebackType
from typing import Any, Protocol

import msgspec

from backends.base import Backend, Taker, give_all
from backends.http.backend import HttpBackend
from policies.errors import BeyondAsked
from policies.nouns import ACCEPTED, ClusterView, Delta, Prompt
from router.ask import Ask
from router.call.bid import Placed
from router.call.caller import Caller
from router.call.hedging import Race
from router.call.observer import Account
from router.call.tracing import AttemptTrace
from router.fleet.cluster.flights import Flight, may_move
from router.text.thoughts import reading_thoughts
from router.text.tool_calls import reading_calls

PARTS_OF_A_TOKEN = 8
"""An answer of as many pieces for each token that was asked for is ended, whatever their size."""

_LETTERS = 2
"""Characters of a piece, on average, that is a whole token."""


class Carrier(Protocol):
    """Takes prompts to backends. `way` is equal for those that can reach the same backends.

    `continues`: it can take an answer that one backend began to another one.
    """

    continues: bool

    @property
    def way(self) -> Hashable:
        """What tells it from carriers that reach other backends."""
        ...

    def seen(self, view: ClusterView) -> ClusterView:
        """`view` with `unfit` set at the backends that it cannot reach."""
        ...

    def carry(self, placed: Placed, backend: Backend, prompt: Prompt, to: Taker) -> Coroutine[Any, Any, None]:
        """Take `prompt` to `backend`, where it was placed, and the answer to `to`.

        Raises as `Backend.generate` does, and what `to` raises.
        """
        ...


class Ourselves:
    """The router itself sends the prompt and passes the answer on. It reaches every backend."""

    way = None
    continues = True

    def seen(self, view: ClusterView) -> ClusterView:
        """All of it."""
        return view

    def carry(self, placed: Placed, backend: Backend, prompt: Prompt, to: Taker) -> Coroutine[Any, Any, None]:
        """What the backend answers, with reasoning and tool calls parsed out of its text unless it has parsed them."""
        request = placed.bid.request
        if (tools := placed.bid.tools) is not None:
            to = reading_calls(to, backend, request, tools)
        if (thoughts := placed.bid.thoughts) is not None:
            to = reading_thoughts(to, backend, request, thoughts)
        if isinstance(backend, HttpBackend):
            return backend.relay(request, prompt, to)
        return give_all(backend.generate(request, prompt), to)


class UntilGivenUp(msgspec.Struct, eq=False):
    """A context manager that raises what `flight` is given up with: its backend is late, ill or gone."""

    flight: Flight
    _task: asyncio.Task[object] | None = None
    _given_up: BaseException | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.flight!r}>"

    def __enter__(self) -> None:
        self._task, self._given_up = asyncio.current_task(), None
        self.flight.give_up, self.flight.can_move = self._give_up, self.can_move

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        # a flight that refers to this, and is referred to by it, would wait for the garbage collector
        self.flight.give_up, self.flight.can_move = None, may_move
        if self._given_up is None or self._task is None or not isinstance(error, asyncio.CancelledError):
            return
        # the client may have left in the same moment
        if self._task.uncancel() <= 0:
            raise self._given_up from error

    def can_move(self) -> bool:
        """Could another backend go on?"""
        return True

    def _give_up(self, failure: BaseException) -> None:
        assert self._task is not None, "a call runs in a task"
        if self._given_up is None and self._task.cancel():
            self._given_up = failure


class Delivery(UntilGivenUp, kw_only=True, eq=False):
    """Gets the Deltas of the backend of `placed`, a Taker: accounts for them, and passes them on to `caller` as the
    answer to prompt `at` of `ask`; where there is a `race`, once that backend leads it. `close` it at the end.
    """

    caller: Caller
    ask: Ask
    at: int
    placed: Placed
    race: Race | None
    account: Account
    attempt: AttemptTrace | None
    clock: Callable[[], float]
    most_tokens: float = math.inf
    """What was asked for, over all choices."""
    pending: Coroutine[Any, Any, None] | None = None
    """What the caller has not taken yet."""
    _is_lenient: bool = False
    _unechoed: set[int] | None = None
    """The choices that have not begun with the prompt's text, where they are to."""

    def can_move(self) -> bool:
        """Could another backend begin the answer, or continue it?"""
        return not self.caller.has_seen(self.at) or self.placed.bid.beginning() is not None

    def take(self, delta: Delta) -> bool:
        """Account for `delta`, and pass it on; False: the caller is still to take it. Raises Beaten, CallerGone."""
        if delta.is_repeat:
            return True
        flight, now = self.flight, self.clock()
        drawn_tokens = flight.drawn_tokens
        flight.heard(delta, now)
        if delta is ACCEPTED:
            return True
        if drawn_tokens >= self.most_tokens and flight.drawn_tokens > drawn_tokens:
            self._bound(drawn_tokens)
        placed, race = self.placed, self.race
        if delta.computed_tokens is None:
            bid = placed.bid
            if race is not None and race.leader is not placed:
                race.lead(placed)
            if flight.first_at is not None:
                self.account.heard(now)
            if bid.so_far is not None:
                bid.so_far.add(delta)
            if bid.echo and bid.prompt.beginning is None:
                if self._unechoed is None:
                    self._unechoed = set(range(bid.request.sampling.choices))
                delta = self.ask.echoed(delta, bid.echo, self._unechoed)
        elif race is not None and placed is not race.placed:
            return True
        if delta.finish_reason is not None and self.attempt is not None:
            self.attempt.finished(delta.finish_reason)
        pending = self.pending = self.caller.write(self.at, delta)
        if pending is None:
            return True
        flight.hold()
        return False

    def _bound(self, drawn_tokens: int) -> None:
        """More came than the `drawn_tokens` that were asked for. Raises BeyondAsked, unless these may be parts of
        tokens: a few servers send single letters, and calls and thoughts in parts of any size.
        """
        so_far, most = self.placed.bid.so_far, self.most_tokens
        characters = None if so_far is None else so_far.characters
        if not self._is_lenient and (characters is None or characters < _LETTERS * drawn_tokens):
            self._is_lenient = True
            self.most_tokens = PARTS_OF_A_TOKEN * most
            return
        raise BeyondAsked(f"{self.flight.backend} goes on behind the tokens that were asked for")

    async def ready(self) -> None:
        """Return once the caller has taken the newest Delta. Raises CallerGone."""
        pending, self.pending = self.pending, None
        if pending is not None:
            await pending
            self.flight.relayed(self.clock())

    def close(self) -> None:
        """Drop what the caller has not taken, where the answer ends before it does."""
        if self.pending is not None:
            self.pending.close()
            self.pending = None
