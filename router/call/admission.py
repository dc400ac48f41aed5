"""Claims and permits: what a call reserves of its tenant's quota, at the highest price that may hold, and the right to
run it, which is settled once, whatever happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from policies.errors import QuotaExceeded
from policies.nouns import Outcome, Tenant, Usage
from policies.quota.budget import (
    ANSWER_TOKENS,
    Charge,
    Descriptor,
    Near,
    Refused,
    Reservation,
    Standing,
    at_model,
    charge_of,
    descriptors,
    estimate,
    meters,
)
from policies.quota.prices import PriceList, Prices
from policies.rules import Facts, Ruling
from router.ask import Ask, Chat
from router.call.outcome import outcome_of
from router.shared.store.base import QuotaStore

if TYPE_CHECKING:
    # these have parts that have permits
    from router.call.bid import Bid
    from router.call.gateway import Gateway
    from router.call.identify import Identity
    from router.call.prepare import LookedUp
    from router.fleet.cluster.served_model import ServedModel

_RETRY_AFTER_S = 1.0


Tell = Callable[[Standing], None]


class Claim(msgspec.Struct, frozen=True):
    """What one call asks for: the limits that bind it (its tenant's first), and what to reserve."""

    id: str
    descriptors: tuple[Descriptor, ...]
    charge: Charge

    @property
    def tenant(self) -> str:
        """The tenant that pays."""
        return self.descriptors[0].tenant


class Admission:
    """Decides which calls may run now. Holds the open permits, by descriptor; the store limits use over time.

    `on_near` gets the budgets of a call that are near their end.
    """

    def __init__(self, store: QuotaStore, *, on_near: Callable[[Sequence[Near]], None] = lambda _: None) -> None:
        self.store, self._on_near = store, on_near
        self._open: set[Permit] = set()
        self._running: dict[tuple[str, str], int] = {}
        self.settled: Counter[Outcome] = Counter()

    def __repr__(self) -> str:
        tenants = {tenant: count for (tenant, scope), count in sorted(self._running.items()) if not scope}
        named = ", ".join(f"{tenant}: {count}" for tenant, count in tenants.items())
        return f"<Admission {len(self._open)} open ({named}), {self.settled.total()} settled>"

    def running(self, tenant: str) -> int:
        """How many permits of `tenant` are open."""
        return self._running.get((tenant, ""), 0)

    def is_idle(self) -> bool:
        """Is no permit open?"""
        return not self._open

    def check(self) -> None:
        """Assert that the counts agree with the open permits; with none open, all counts are zero."""
        counted = Counter(descriptor.id for permit in self._open for descriptor in permit.claim.descriptors)
        assert counted == self._running, f"{self!r}: counts differ from permits {counted}"
        assert all(permit.outcome is None for permit in self._open), f"{self!r}: a settled permit is still open"

    def close(self, permit: Permit) -> None:
        """`permit` is open no more. Called by the permit itself, once."""
        running = self._running
        self._open.discard(permit)
        for descriptor in permit.claim.descriptors:
            if left := running[descriptor.id] - 1:
                running[descriptor.id] = left
            else:
                del running[descriptor.id]


class Permit:
    """An async context manager: entered it is open, left it is settled with the Outcome and the `usage` so far.

    `tell` hears what is left to its tenant when it is entered or refused. `reservation` is what was taken for it, None
    where its tenant has no limits. `charge` is what it used, as its tenant pays for it; a call without an answer counts
    as one request and no tokens.
    """

    __slots__ = ("_admission", "_tell", "charge", "claim", "outcome", "reservation", "usage")

    def __init__(self, admission: Admission, claim: Claim, tell: Tell = lambda _: None) -> None:
        self.claim, self._tell = claim, tell
        self.usage: Usage | None = None
        self.charge = Charge(1)
        self.outcome: Outcome | None = None
        self.reservation: Reservation | None = None
        self._admission = admission

    def __repr__(self) -> str:
        return f"<Permit of {self.claim.tenant}: {self.outcome or 'open'}, {self.usage}>"

    def spend(self, usage: Usage, prices: Prices) -> int:
        """Charge `usage` at `prices` on top of what was charged before; the cost of it, in thousandths of a unit."""
        charge, before = charge_of(usage, prices), self.charge
        self.charge = Charge(1, before.tokens + charge.tokens, before.cost + charge.cost)
        self.usage = usage if self.usage is None else self.usage.and_(usage)
        return charge.cost

    async def __aenter__(self) -> Permit:
        """Reserve what it claims. Raises QuotaExceeded, and then nothing was reserved."""
        admission, claim = self._admission, self.claim
        running = admission._running
        for descriptor in claim.descriptors:
            most = descriptor.limits.concurrent
            if most is not None and (count := running.get(descriptor.id, 0)) >= most:
                raise QuotaExceeded(
                    f"{descriptor} has {count} requests running, which is its limit",
                    hint="wait for one to finish",
                    retry_after_s=_RETRY_AFTER_S,
                )
        # counted before the store is asked: others come in meanwhile
        admission._open.add(self)
        for descriptor in claim.descriptors:
            running[descriptor.id] = running.get(descriptor.id, 0) + 1
        if not meters(claim.descriptors):
            return self
        answer: Reservation | Refused | None = None
        try:
            answer = await admission.store.reserve(Reservation(claim.id, claim.descriptors, claim.charge))
        finally:
            if not isinstance(answer, Reservation):
                admission.close(self)
        if answer.standing.near:
            admission._on_near(answer.standing.near)
        self._tell(answer.standing)
        if isinstance(answer, Refused):
            raise answer.error()
        self.reservation = answer
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it and say what it really used."""
        assert self.outcome is None, f"{self!r} is settled twice"
        admission = self._admission
        self.outcome = Outcome.FINISHED if error is None else outcome_of(error)
        admission.close(self)
        admission.settled[self.outcome] += 1
        if self.reservation is not None:
            # no store makes a call wait here, so a call that was cancelled settles like any other
            await admission.store.settle(self.reservation, self.charge)


def claim_of(
    id: str,  # noqa: A002 - it is the call's id
    ask: Ask,
    prompts: Sequence[LookedUp],
    facts: Facts,
    model: ServedModel,
    identity: Identity,
    tags: Sequence[str],
    prices: PriceList,
    ruling: Ruling,
    gateway: Gateway,
) -> Claim:
    """What one call reserves of its tenant's quota: one request, and the tokens of all its prompts and answers, at the
    highest of `prices` that holds at any pool of its `ruling`.

    `model` is the one that answers; `identity` is that of its caller.
    """
    user = None if ask.user is None else gateway.end_users.counted(facts.tenant, ask.user)
    bound = descriptors(facts.tenant, model.name, identity.key, team=identity.team, user=user, tags=tags)
    if not meters(bound):
        # what it costs is known at its end
        return Claim(id, bound, Charge(1))
    highest, charges = prices.highest(model.name, ruling.pools), []
    for given, prompt in zip(ask.inputs, prompts, strict=True):
        size = _Size(prompt.tokens.count, prompt.uncached_tokens, facts.max_new_tokens, ask.sampling.choices)
        images = given.images if isinstance(given, Chat) else 0
        charges.append(_charge(size, images, highest, model.name, ruling.pools, gateway))
    whole = charges[0]
    if len(charges) > 1:
        whole = Charge(1, sum([each.tokens for each in charges]), sum([each.cost for each in charges]))
    return Claim(id, bound, whole)


def claim_at(model: str, claim: Claim, bid: Bid, *, tenant: Tenant, prices: Prices, gateway: Gateway) -> Claim | None:
    """What one prompt reserves where `bid` has it degraded to `model`, beside the `claim` of its call: of what its
    tenant and team may use of that model, the same as if it had asked for it. None where nothing is limited there.
    """
    team = next((one.team for one in claim.descriptors if one.team is not None), None)
    bound = at_model(tenant, model, None if team is None else tenant.teams.get(team))
    limited = tuple(one for one in bound if one not in claim.descriptors)
    if not limited:
        return None
    request = bid.request
    size = _Size(request.prompt_tokens, None, request.max_new_tokens, request.sampling.choices)
    charge = _charge(size, bid.images, prices, model, request.pools, gateway)
    return Claim(f"{request.id}:{model}", limited, charge)


class _Size(NamedTuple):
    """Tokens of one prompt and its answers; `uncached_tokens` None: all of them."""

    prompt_tokens: int
    uncached_tokens: int | None
    max_new_tokens: int
    choices: int


def _charge(
    size: _Size, images: int, prices: Prices, model: str, pools: Collection[str] | None, gateway: Gateway
) -> Charge:
    return estimate(
        size.prompt_tokens,
        uncached_tokens=size.uncached_tokens,
        max_new_tokens=size.max_new_tokens,
        choices=size.choices,
        prices=prices,
        images=images,
        # views of all backends are made only where seconds cost something
        backend_ms=_longest_ms(size, model, pools, gateway) if prices.second else 0,
    )


def _longest_ms(size: _Size, model: str, pools: Collection[str] | None, gateway: Gateway) -> int:
    """The longest time that one of the backends is predicted to take, with the requests that it has now."""
    uncached = size.prompt_tokens if size.uncached_tokens is None else size.uncached_tokens
    new_tokens = min(size.max_new_tokens, ANSWER_TOKENS)
    longest_s = 0.0
    for view in gateway.cluster.view(gateway.clock()).backends:
        if model in view.models and (pools is None or view.pool in pools):
            first_s = view.latency.ttft_s(uncached, size.prompt_tokens - uncached, queue_s=view.queue_s)
            token_s = view.latency.tpot_s(view.running + 1, view.decoding_tokens + size.prompt_tokens)
            longest_s = max(longest_s, first_s + token_s * new_tokens)
    return round(1000 * longest_s)
