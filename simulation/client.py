"""The client of one arrival: sends it, and records its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from policies.explain import Explanation
from policies.nouns import Capability, Decision, Delta, Fetch, Outcome, PrefillLeg, Request, Sampling, Usage
from policies.quota.budget import Standing
from router.ask import Ask
from router.call.bodies import Held
from router.call.caller import Placement
from router.call.observer import Account
from simulation.arrivals import Arrival
from simulation.backend import NEW_TOKENS, TOKEN_IDS

_PATH = "/v1/completions"


@dataclass(slots=True)
class Call:
    """The result of one arrival. Times are seconds of the simulation; None for an event that did not happen.

    `placed_s` is when it was sent to `backend`, the last one if several were tried. `code` is the error's, or the
    outcome again. `fetch` is the KV that its backend fetched from another cache, and `prefill` the first of its two
    legs, as decided.
    """

    arrival: Arrival
    tenant: str = "unknown"
    service_class: str = "none"
    backend: str | None = None
    pool: str | None = None
    placed_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome | None = None
    code: str = ""
    usage: Usage = field(default_factory=Usage)
    fetch: Fetch | None = None
    prefill: PrefillLeg | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from its arrival to the first piece of its answer."""
        return None if self.first_s is None else self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of each further token of an answer with at least two."""
        later = self.usage.completion_tokens / self.arrival.choices - 1
        if self.first_s is None or self.last_s is None or later < 1:
            return None
        return (self.last_s - self.first_s) / later

    def ended(self, account: Account, outcome: Outcome, code: str, at: float) -> None:
        """Record the outcome."""
        assert self.outcome is None, f"request {self.arrival.id} ended twice"
        self.tenant, self.service_class = account.tenant, account.service_class
        self.first_s, self.last_s, self.ended_s = account.first_at, account.last_at, at
        self.outcome, self.code, self.usage = outcome, code, account.usage


@dataclass
class SimulatedCaller:
    """The Caller of `call`. Its key is its tenant's name: see `simulation.fleet.with_named_keys`."""

    id: str
    key: str | None
    call: Call
    clock: Callable[[], float]
    trace: Mapping[str, str] = field(default_factory=dict)
    seen: bool = False

    async def read(self, held: Held) -> Ask:  # noqa: ARG002 - there is no body
        """The Ask of the arrival."""
        arrival = self.call.arrival
        token_ids = arrival.token_ids()
        needs = frozenset({Capability.CHOICES}) if arrival.choices > 1 else frozenset()
        return Ask(
            arrival.model or "",
            (token_ids,),
            ({TOKEN_IDS: token_ids, NEW_TOKENS: arrival.new_tokens},),
            _PATH,
            sampling=Sampling(choices=arrival.choices),
            max_new_tokens=arrival.max_new_tokens or arrival.new_tokens,
            stream=True,
            needs=needs,
            priority=arrival.priority,
            session=arrival.session,
            deadline_s=arrival.deadline_s,
            headers=arrival.headers,
            metadata=arrival.metadata,
        )

    def limited(self, standing: Standing) -> None:
        """Do nothing: there are no headers to set."""

    def explain(self, index: int, explanation: Explanation) -> None:
        """Do nothing: the client asks for no explanation."""

    def place(self, index: int, placement: Placement) -> None:  # noqa: ARG002 - there is one prompt
        """Record the backend."""
        self.call.backend, self.call.pool, self.call.placed_s = placement.backend, placement.pool, self.clock()

    def write(self, index: int, delta: Delta) -> None:  # noqa: ARG002
        """Do nothing: the account records the times."""
        self.seen = self.seen or delta.computed_tokens is None

    def has_seen(self, index: int) -> bool:  # noqa: ARG002
        """True: the client reads pieces as soon as they are written."""
        return self.seen


@dataclass(slots=True)
class Listening:
    """A telemetry listener that records each call's transfers and outcome, and counts the steps of `on_miss`."""

    calls: Mapping[str, Call]
    steps: dict[tuple[str, str], int] = field(default_factory=dict)

    def decided(self, request: Request, decision: Decision, at: float) -> None:  # noqa: ARG002 - as any listener
        """Record what is transferred; `place` records the backend."""
        call = self.calls[request.id]
        call.fetch, call.prefill = decision.fetch, decision.prefill

    def ended(self, account: Account, outcome: Outcome, code: str, at: float) -> None:
        """Record the outcome of one call."""
        self.calls[account.id].ended(account, outcome, code, at)

    def missed(self, service_class: str, step: str) -> None:
        """Count one step of `on_miss`."""
        self.steps[service_class, step] = self.steps.get((service_class, step), 0) + 1
