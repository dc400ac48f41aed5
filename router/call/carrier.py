"""How a prompt gets to the backend that was chosen for it, and its answer back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from backends.base import Backend, Taker, give_all
from backends.http.backend import HttpBackend
from policies.nouns import ACCEPTED, ClusterView, Delta, Prompt
from router.ask import Ask
from router.call.bid import Placed
from router.call.caller import Caller
from router.call.hedging import Race
from router.call.observer import Account
from router.call.tracing import AttemptTrace
from router.text.thoughts import reading_thoughts
from router.text.tool_calls import reading_calls


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


@dataclass(slots=True, eq=False)
class Delivery:
    """Gets the Deltas of the backend of `placed`, a Taker: accounts for them, and once that backend leads the `race`,
    passes them on to `caller` as the answer to prompt `at` of `ask`.

    `on_won` is called when that backend was not the first of the race and takes the lead. `close` it at the end.
    """

    caller: Caller
    ask: Ask
    at: int
    placed: Placed
    race: Race
    account: Account
    attempt: AttemptTrace | None
    clock: Callable[[], float]
    on_won: Callable[[], None]
    _echo: str = field(init=False)
    _unechoed: set[int] = field(init=False)
    pending: Coroutine[Any, Any, None] | None = field(default=None, init=False)
    """What the caller has not taken yet."""

    def __post_init__(self) -> None:
        bid = self.placed.bid
        self._echo = bid.echo if bid.prompt.beginning is None else ""
        self._unechoed = set(range(bid.request.sampling.choices)) if self._echo else set()

    def take(self, delta: Delta) -> bool:
        """Account for `delta`, and pass it on; False: the caller is still to take it. Raises Beaten, CallerGone."""
        if delta.is_repeat:
            return True
        placed, race, now = self.placed, self.race, self.clock()
        flight, so_far = placed.flight, placed.bid.so_far
        flight.heard(delta, now)
        if delta is ACCEPTED:
            return True
        if delta.computed_tokens is None:
            if race.leader is not placed:
                race.lead(placed)
                if placed is not race.first:
                    self.on_won()
            if flight.first_at is not None:
                self.account.heard(now)
            if so_far is not None:
                so_far.add(delta)
            if self._echo:
                delta = self.ask.echoed(delta, self._echo, self._unechoed)
        elif placed is not race.placed:
            return True
        if delta.finish_reason is not None and self.attempt is not None:
            self.attempt.finished(delta.finish_reason)
        self.pending = self.caller.write(self.at, delta)
        if self.pending is None:
            return True
        flight.hold()
        return False

    async def ready(self) -> None:
        """Return once the caller has taken the newest Delta. Raises CallerGone."""
        pending, self.pending = self.pending, None
        if pending is not None:
            await pending
            self.placed.flight.relayed(self.clock())

    def close(self) -> None:
        """Drop what the caller has not taken, where the answer ends before it does."""
        if self.pending is not None:
            self.pending.close()
            self.pending = None
