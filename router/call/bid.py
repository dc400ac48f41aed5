"""One prompt that looks for a backend, and what it finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from policies.errors import ExpectedError
from policies.fairness.ticket import Ticket
from policies.nouns import BackendView, ClusterView, Decision, Prompt, Request, ServiceClass
from policies.predict import cost_s, fastest_decode_s, promised_ttft_s
from policies.waiting import is_outage
from router.fleet.cluster.flights import Flight
from router.text.tool_calls import ToolSyntax


class Found(msgspec.Struct, frozen=True):
    """A decision and the view that it was made on. `is_free`: it chose a backend, and nobody else is to go first."""

    view: ClusterView
    decision: Decision
    is_free: bool

    @property
    def is_outage(self) -> bool:
        """Is nobody well who could take it?"""
        return is_outage(self.decision)


class Placed(msgspec.Struct, frozen=True):
    """A backend was found and counts the request already: whoever gets this ends the `flight`."""

    bid: Bid
    found: Found
    flight: Flight

    def too_short(self) -> frozenset[str]:
        """Backends that find the prompt too long where its own does; none, unless one has a longer context.

        Only a prompt with an estimated length comes to a backend that finds it too long.
        """
        request = self.bid.request
        contexts = {
            one.name: one.context_tokens or 0 for one in self.found.view.backends if request.model in one.models
        }
        limit = contexts.get(self.flight.backend)
        if not limit or request.least_prompt_tokens is None or max(contexts.values()) <= limit:
            return frozenset()
        return frozenset(name for name, known in contexts.items() if 0 < known <= limit)


class Decide(Protocol):
    """Decides for a request on what is known at that moment."""

    def __call__(
        self, request: Request, avoiding: Collection[str], /, *, all_backends: bool = False
    ) -> tuple[ClusterView, Decision]:
        """The decision for `request` without the backends in `avoiding`, and its view; `all_backends`: no shortlist."""
        ...


@dataclass(eq=False, slots=True)
class Bid:
    """One prompt that looks for a backend, with what goes there (`prompt`), what the answer begins with (`echo`), and
    how it may call `tools`.

    `decide` chooses on what is known at that moment, avoiding some backends; `refusal` is the error where nobody can
    take it; `sent` hears to which backend it goes, and `ended` how the last of its flights ended, with the backend as
    it was before. An answer of `new_tokens` is expected. Of `due_at`, when the first
    token is promised (None: whenever it comes), and `cost_s`, the backend time that it is predicted to take, the first
    look tells. `way` tells which backends its carrier can reach. `tries` counts the backends that had it and failed,
    `failed` are those that did not answer it, the first of them at `failed_at`.
    """

    request: Request
    prompt: Prompt
    service_class: ServiceClass
    new_tokens: int
    arrived_at: float
    decide: Decide
    refusal: Callable[[Request, ClusterView, Decision], ExpectedError]
    sent: Callable[[str], None]
    ended: Callable[[Flight, BackendView], None]
    echo: str = ""
    tools: ToolSyntax | None = None
    way: Hashable = None
    due_at: float | None = None
    cost_s: float | None = None
    avoiding: frozenset[str] = frozenset()
    tries: int = 0
    failed: frozenset[str] = frozenset()
    failed_at: float | None = None
    is_charged: bool = False
    waiting: asyncio.Future[Placed] | None = None

    def __repr__(self) -> str:
        state = "waits" if self.waiting else "charged" if self.is_charged else "new"
        return f"<Bid {self.request.id} of {self.request.tenant} in {self.request.service_class}: {state}>"

    @property
    def shape(self) -> Hashable:
        """Bids of one shape need the same kind of room: where one finds none, the others need not look."""
        request = self.request
        size = request.prompt_tokens.bit_length()
        return (request.pools, request.policy, request.needs, request.rank, size, self.avoiding, self.way)

    def fail(self, backend: str, now: float) -> None:
        """`backend` did not answer it: it goes elsewhere, while there is anybody else."""
        self.avoiding |= {backend}
        self.failed |= {backend}
        self.failed_at = now if self.failed_at is None else self.failed_at

    def measure(self, view: ClusterView, decision: Decision) -> None:
        """Predict `cost_s` and `due_at` from the first decision; later ones do not change what was promised."""
        if self.cost_s is None:
            self.cost_s = cost_s(self.request, view, decision, new_tokens=self.new_tokens)
            decode_s = 0.0
            if self.service_class.deadline_s is not None:
                decode_s = fastest_decode_s(self.request, view, decision, new_tokens=self.new_tokens)
            promised_s = promised_ttft_s(self.service_class, decode_s)
            self.due_at = None if promised_s is None else self.arrived_at + promised_s

    def ticket(self) -> Ticket:
        """Its place in the fair queue."""
        request = self.request
        assert self.cost_s is not None, f"{self!r} was not measured"
        return Ticket(
            id=request.id,
            tenant=request.tenant,
            service_class=request.service_class,
            cost_s=self.cost_s,
            arrived_at=self.arrived_at,
            tokens=request.prompt_tokens,
        )
