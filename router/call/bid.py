"""One prompt that looks for a backend, and what it finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec
from msgspec.structs import replace

from policies.errors import (
    BackendFailed,
    BackendLacks,
    ContextExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
    Unreached,
)
from policies.fairness.ticket import Ticket
from policies.nouns import BackendView, Beginning, ClusterView, Decision, Prompt, Request, ServiceClass
from policies.predict import cost_s, fastest_decode_s, promised_ttft_s
from policies.waiting import is_outage
from router.call.so_far import SoFar
from router.fleet.cluster.flights import Flight
from router.text.thoughts import ThoughtSyntax
from router.text.tool_formats import ToolSyntax

MOST_TRIES = 3
"""Backends that one prompt may be tried on; backends that it never reached do not count."""


class Found(msgspec.Struct, frozen=True):
    """A decision and the view that it was made on. `is_free`: it chose a backend, and no other bid goes first."""

    view: ClusterView
    decision: Decision
    is_free: bool

    @property
    def is_outage(self) -> bool:
        """Is no backend well that could take it?"""
        return is_outage(self.decision)


class Placed(msgspec.Struct, frozen=True):
    """A backend was `chosen`, and counts the request already: the receiver of this ends the `flight`."""

    bid: Bid
    found: Found
    chosen: BackendView
    flight: Flight


class Look(msgspec.Struct, frozen=True):
    """How a bid looks for a backend.

    `all_backends`: no shortlist. `takes_any`: it waits for no backend while another has room. `awaited` counts the bids
    that get the next places of a backend, by its name.
    """

    all_backends: bool = False
    takes_any: bool = False
    awaited: Mapping[str, int] = MappingProxyType({})


USUAL = Look()


_NO_TICKET = Ticket("", "", "", 0.0, 0.0)
"""Before the first look."""


class Decide(Protocol):
    """Decides for a request on what is known at that moment."""

    def __call__(self, request: Request, avoiding: Collection[str], look: Look, /) -> tuple[ClusterView, Decision]:
        """The decision for `request` without the backends in `avoiding`, and its view."""
        ...


class Bid(msgspec.Struct, eq=False):
    """One prompt that looks for a backend, with what goes there (`prompt`), what the answer begins with (`echo`), and
    how it may call `tools` and contain `thoughts`.

    `decide` chooses on what is known at that moment, avoiding some backends; `refusal` is the error if no backend can
    take it; `sent`, where there is one, is called with the backend that gets it, and `ended` with its last flight and
    the backend's view from before. An answer of `new_tokens` is expected. The first look sets `due_at`, when the first
    token is promised (None: at any time), `cost_s`, the predicted backend time, and its `ticket` in the fair queue.
    `way` tells which backends its carrier can reach.

    Its prompt has `images`. `so_far` records the answer, where another backend may continue it.

    The state of its retries is changed here alone: `tries` counts the backends that had it and failed, `failed` are the
    backends that did not answer it, the first of them at `failed_at`, and `avoiding` are those that may not get it.

    While it waits, `awaits` is the backend that it waits for; None: any. `lacks_tokens` of its prompt are not held
    there. After `patience` ends it takes any.
    """

    request: Request
    prompt: Prompt
    service_class: ServiceClass
    new_tokens: int
    arrived_at: float
    decide: Decide
    refusal: Callable[[Request, ClusterView, Decision], ExpectedError]
    sent: Callable[[str], None] | None
    ended: Callable[[Flight, BackendView], None]
    echo: str = ""
    tools: ToolSyntax | None = None
    thoughts: ThoughtSyntax | None = None
    so_far: SoFar | None = None
    way: Hashable = None
    images: int = 0
    due_at: float | None = None
    cost_s: float | None = None
    ticket: Ticket = _NO_TICKET
    avoiding: frozenset[str] = frozenset()
    tries: int = 0
    failed: frozenset[str] = frozenset()
    failed_at: float | None = None
    is_charged: bool = False
    waiting: asyncio.Future[Placed] | None = None
    awaits: str | None = None
    lacks_tokens: int = 0
    takes_any: bool = False
    patience: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "waits" if self.waiting else "charged" if self.is_charged else "new"
        return f"<Bid {self.request.id} of {self.request.tenant} in {self.request.service_class}: {state}>"

    @property
    def shape(self) -> Hashable:
        """Bids of one shape need the same kind of room: where one finds none, the others need not look."""
        request = self.request
        size = request.prompt_tokens.bit_length()
        return (request.pools, request.policy, request.needs, request.rank, size, self.avoiding, self.way)

    def may_retry(self, placed: Placed, failure: ExpectedError, now: float) -> bool:
        """The backend of `placed` ended it with `failure` at `now`: avoid that backend. May another one be tried?

        Not after MOST_TRIES backends had it, nor after an error that any other backend would give as well. If the
        prompt is too long for the backend, others with a context as short are avoided too; if its kind cannot be told
        all of it, others of that kind.
        """
        if isinstance(failure, ContextExceeded):
            too_short = self._too_short(placed)
            self.avoiding |= too_short
            return bool(too_short)
        if isinstance(failure, InvalidRequest) and failure.is_of_kind:
            kind = placed.chosen.kind
            self.avoiding |= {backend.name for backend in placed.found.view.backends if backend.kind == kind}
            self.tries += 1
            return self.tries < MOST_TRIES
        if not isinstance(failure, BackendFailed | Overloaded | BackendLacks):
            return False
        self.avoiding |= {placed.chosen.name}
        self.failed |= {placed.chosen.name}
        self.failed_at = now if self.failed_at is None else self.failed_at
        self.tries += not isinstance(failure, Unreached)
        return self.tries < MOST_TRIES

    def may_retry_prefill(self, name: str) -> bool:
        """The backend `name` did not compute the prompt for one that computes none: avoid it. May another one be tried?

        Not after MOST_TRIES backends had the prompt.
        """
        self.avoiding |= {name}
        self.tries += 1
        return self.tries < MOST_TRIES

    @property
    def is_new(self) -> bool:
        """Did no backend have it yet?"""
        return not self.failed and self.prompt.beginning is None

    def start_over(self) -> None:
        """Forget what came of the answer: its client has seen nothing."""
        self.so_far = None if self.so_far is None else SoFar()

    def beginning(self) -> Beginning | None:
        """What its client has of the answer, if another backend can continue it."""
        return None if self.so_far is None else self.so_far.beginning(self.request, self.prompt.body)

    def resume(self) -> bool:
        """Ask for the rest of the answer, of which the client has the beginning, from now on; can another backend?

        A backend that added to the answer does not count as a try.
        """
        beginning = self.beginning()
        if beginning is None:
            return False
        if self.prompt.beginning is None or self.prompt.beginning.tokens < beginning.tokens:
            self.tries = 0
        self.prompt = replace(self.prompt, beginning=beginning)
        self.request = replace(self.request, needs=self.request.needs | {beginning.needs})
        return True

    def forgive(self, is_ill: Callable[[str], bool]) -> bool:
        """Allow the backends again that failed it and are ill or on trial now, once they are well; is there one?"""
        ill = frozenset(filter(is_ill, self.failed & self.avoiding))
        self.avoiding -= ill
        return bool(ill)

    def patience_s(self, since: float, now: float, outage_s: float) -> float:
        """For how many seconds from `now` on it may at least wait in an outage that began at `since`.

        That is `outage_s` after the outage or the bid began, or after its first failure if there was one, and always up
        to the deadline of its class.
        """
        # repeated failures do not prolong the wait
        began_at = max(since, self.arrived_at) if self.failed_at is None else self.failed_at
        deadline_s = self.service_class.deadline_s or 0.0
        return max(began_at + outage_s, self.arrived_at + deadline_s) - now

    def _too_short(self, placed: Placed) -> frozenset[str]:
        """Backends that find the prompt too long where that of `placed` does; none if no backend has a longer context.

        Only a prompt with an estimated length comes to a backend that finds it too long.
        """
        backends, model = placed.found.view.backends, self.request.model
        contexts = {backend.name: backend.context_tokens or 0 for backend in backends if model in backend.models}
        limit = contexts.get(placed.chosen.name)
        if not limit or self.request.least_prompt_tokens is None or max(contexts.values()) <= limit:
            return frozenset()
        return frozenset(name for name, known in contexts.items() if 0 < known <= limit)

    def measure(self, view: ClusterView, decision: Decision) -> None:
        """Predict `cost_s` and `due_at` from the first decision; later ones do not change what was promised."""
        if self.cost_s is None:
            self.cost_s = cost_s(self.request, view, decision, new_tokens=self.new_tokens)
            promised_s = self.service_class.ttft_s
            if self.service_class.deadline_s is not None:
                decode_s = fastest_decode_s(self.request, view, decision, new_tokens=self.new_tokens)
                promised_s = promised_ttft_s(self.service_class, decode_s)
            self.due_at = None if promised_s is None else self.arrived_at + promised_s
            request = self.request
            self.ticket = Ticket(
                id=request.id,
                tenant=request.tenant,
                service_class=request.service_class,
                cost_s=self.cost_s,
                arrived_at=self.arrived_at,
                tokens=request.prompt_tokens,
            )
