"""Limits as meters, and what a request is charged: estimated before it runs, exact afterwards.

A rate (requests, tokens a minute) is the continuous-state leaky bucket of ITU-T I.371, the second form of the GCRA:
the level falls at the limit's rate, and a whole minute's limit may be taken at once. A budget (cost a day) is
counted from midnight to midnight UTC, as a bill is; one of an hour, a week, a month or a fixed period likewise.

Everything is an integer, so that it balances to the unit: time in milliseconds, the level of a rate in 1/60,000 of its
resource (for a limit of 600 a minute the level falls by 600 each millisecond), the level of a budget in thousandths.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Context, Decimal
from functools import lru_cache

import msgspec
from msgspec.structs import replace as replaced

from policies.errors import QuotaExceeded
from policies.nouns import NO_LIMITS, Limits, Team, Tenant, Usage
from policies.quantities import CURRENCY_UNITS, PRICE_PARTS, rounded_seconds
from policies.quota.periods import DAY_MS, Period, Span
from policies.quota.prices import Prices

MINUTE_MS = 60_000
COST_UNIT = 1000
_COST_PARTS = PRICE_PARTS // COST_UNIT

ANSWER_TOKENS = 1024
"""Most tokens of an answer that are reserved. Clients ask for the longest possible answer and stop far sooner; a longer
one is charged when it ends, into debt if necessary. 1024 is also what LiteLLM reserves for an unknown answer."""

MOST_TOKENS = 10**9
"""More tokens than any request has: larger reports of a backend are cut to this. Keeps levels far below 2**53."""


MOST_MS = 10**8
"""More milliseconds than any request takes."""


class Charge(msgspec.Struct, frozen=True):
    """The charge of one request, never negative. `tokens` are those that are computed: uncached prompt and answer.
    `cost` is in thousandths of a unit of cost, so that sums are exact."""

    requests: int = 0
    tokens: int = 0
    cost: int = 0

    def and_(self, more: Charge) -> Charge:
        """The sum of both."""
        return Charge(self.requests + more.requests, self.tokens + more.tokens, self.cost + more.cost)

    def amounts(self, metered: Sequence[Meter]) -> list[int]:
        """The amounts by which this raises the levels of `metered`."""
        found = []
        for meter in metered:
            found.append(meter.unit * getattr(self, meter.counts))  # noqa: PERF401 - a comprehension is a call before Python 3.12
        return found


ONE_REQUEST = Charge(1)
"""Of a call that has used nothing yet."""


def charge_of(usage: Usage, prices: Prices) -> Charge:
    """The actual charge of a request that ended, in whatever way, with `usage`."""
    prompt = min(max(0, usage.prompt_tokens), MOST_TOKENS)
    cached = min(max(0, usage.cached_tokens), prompt)
    output = min(max(0, usage.completion_tokens), MOST_TOKENS)
    parts = (prompt - cached) * prices.uncached + cached * prices.cached + output * prices.output
    if usage.cache_write_tokens:
        written = min(max(0, usage.cache_write_tokens), prompt - cached)
        parts += written * (prices.written - prices.uncached)
    if prices.image:
        parts += usage.images * prices.image
    if prices.second:
        parts += min(usage.backend_ms, MOST_MS) * prices.second // 1000
    # rounded once for a request, half up: the sums of charges are exact from here on
    return Charge(1, prompt - cached + output, (parts + _COST_PARTS // 2) // _COST_PARTS)


def estimate(
    prompt_tokens: int,
    *,
    uncached_tokens: int | None,
    max_new_tokens: int,
    choices: int = 1,
    prices: Prices,
    images: int = 0,
    backend_ms: int = 0,
) -> Charge:
    """The charge to reserve for one request: the estimated uncached part of its prompt (None: all of it), which may
    have to be written to a cache, and for each of its `choices` an answer of `max_new_tokens` or ANSWER_TOKENS,
    whichever is shorter."""
    cached = 0 if uncached_tokens is None else prompt_tokens - uncached_tokens
    is_dear = prices.cache_write is not None and prices.cache_write > prices.uncached
    written = prompt_tokens - cached if is_dear else 0
    new_tokens = min(max_new_tokens, ANSWER_TOKENS) * choices
    usage = Usage(prompt_tokens, new_tokens, cached, None, False, written, images, backend_ms)
    return charge_of(usage, prices)


class Resource(enum.StrEnum):
    """The resource that a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    COST = "cost"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The callers that `limits` bind: a tenant, or a part of it, which is a team, one of its keys (by the key's id), a
    tag, an end user, or those of its requests that go to one model; or, without a tenant, an organization.

    The meters of one request have one `ledger`, so that they are taken together: that of the organization, if its
    tenant has one. `scope` is the part of a meter's name that tells the descriptors of one tenant apart; empty for the
    tenant itself. `id` tells all descriptors apart. `meters` are the limits that are counted, in a fixed order.
    """

    tenant: str
    limits: Limits
    model: str | None = None
    key: str | None = None
    team: str | None = None
    user: str | None = None
    tag: str | None = None
    organization: str | None = None
    ledger: str = field(init=False, compare=False, repr=False)
    scope: str = field(init=False, compare=False, repr=False)
    id: tuple[str, str] = field(init=False, compare=False, repr=False)
    meters: tuple[Meter, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        limits = self.limits
        counted: list[tuple[Resource, int | None, Period | Span | None, bool]] = [
            (Resource.REQUESTS, limits.requests_per_minute, None, False),
            (Resource.TOKENS, limits.tokens_per_minute, None, False),
            (Resource.COST, limits.cost_per_hour, Period.HOUR, False),
            (Resource.COST, limits.cost_per_day, Period.DAY, False),
            (Resource.COST, limits.cost_per_week, Period.WEEK, False),
            (Resource.COST, limits.cost_per_month, Period.MONTH, False),
            (Resource.COST, limits.soft_cost_per_hour, Period.HOUR, True),
            (Resource.COST, limits.soft_cost_per_day, Period.DAY, True),
            (Resource.COST, limits.soft_cost_per_week, Period.WEEK, True),
            (Resource.COST, limits.soft_cost_per_month, Period.MONTH, True),
        ]
        for budget in limits.fixed:
            span = Span(budget.name, budget.first_day, budget.last_day)
            counted.append((Resource.COST, budget.cost, span, budget.is_soft))
        # a user's name may have any characters, so nothing stands behind it
        parts = (("&", self.team), ("@", self.key), ("#", self.tag), (":", self.model), ("~", self.user))
        scope = "".join([sign + name for sign, name in parts if name is not None])
        # the name of a tenant has no space
        ledger = self.tenant if self.organization is None else f"organization {self.organization}"
        object.__setattr__(self, "ledger", ledger)
        object.__setattr__(self, "scope", scope)
        object.__setattr__(self, "id", (self.tenant or ledger, scope))
        found = [
            Meter(self, resource, limit, period, is_soft)
            for resource, limit, period, is_soft in counted
            if limit is not None
        ]
        object.__setattr__(self, "meters", tuple(found))

    @property
    def kind(self) -> str:
        """What is limited, in a word."""
        kinds = (("user", self.user), ("key", self.key), ("tag", self.tag), ("model", self.model), ("team", self.team))
        return next((kind for kind, name in kinds if name is not None), "tenant" if self.tenant else "organization")

    def __str__(self) -> str:
        if not self.tenant:
            return f"organization '{self.organization}'"
        of_user = "" if self.user is None else f"user '{self.user}' of "
        of_key = "" if self.key is None else f"key {self.key} of "
        of_tag = "" if self.tag is None else f"tag '{self.tag}' of "
        of_team = "" if self.team is None else f"team '{self.team}' of "
        at_model = "" if self.model is None else f" at model '{self.model}'"
        return f"{of_user}{of_key}{of_tag}{of_team}tenant '{self.tenant}'{at_model}"


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit of one descriptor. `limit` is in the units of the SLA file: requests, tokens, units of cost. A soft one
    refuses nothing.

    `name` is unique among the meters of one ledger, and unchanged when the limit changes; `id` is unique among all
    meters. `period` is that of a budget, None for a rate. The level falls by `rate` each millisecond, and that of a
    budget (with a rate of at most 0) at the end of its period; at the level `capacity` nothing is left. A level has a
    stamp: the millisecond for a rate, the number of the period for a budget. A charge raises it by `unit` times its
    member named `counts`.
    """

    descriptor: Descriptor
    resource: Resource
    limit: int
    period: Period | Span | None = None
    is_soft: bool = False
    name: str = field(init=False, compare=False, repr=False)
    id: tuple[str, str] = field(init=False, compare=False, repr=False)
    rate: int = field(init=False, compare=False, repr=False)
    unit: int = field(init=False, compare=False, repr=False)
    capacity: int = field(init=False, compare=False, repr=False)
    counts: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        period = self.period
        # a budget of a day had no other beside it once, and its level goes on
        length = f"/of/{period}" if isinstance(period, Span) else "" if period in {None, Period.DAY} else f"/{period}"
        payer = self.descriptor
        at = f"%{payer.tenant}" if payer.tenant and payer.tenant != payer.ledger else ""
        name = f"{'soft/' if self.is_soft else ''}{self.resource}{length}{at}{payer.scope}"
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "id", (payer.ledger, name))
        object.__setattr__(self, "rate", self.limit if period is None else period.code)
        object.__setattr__(self, "unit", MINUTE_MS if period is None else 1)
        object.__setattr__(self, "capacity", self.limit * (MINUTE_MS if period is None else COST_UNIT))
        object.__setattr__(self, "counts", self.resource.value)

    def stamp(self, now_ms: int) -> int:
        """The stamp of a level at `now_ms`."""
        return now_ms if self.period is None else self.period.number(now_ms)

    def holds(self, now_ms: int) -> bool:
        """Whether it counts what begins at `now_ms`."""
        return self.period is None or self.period.holds(now_ms)

    def need(self, amount: int) -> int:
        """The room that must be free for `amount` to be admitted.

        A rate limits speed, not size: an amount above a whole minute's limit is admitted when the meter is empty, and
        the next request waits until the debt is gone. A budget is never overdrawn knowingly, except a soft one.
        """
        if self.is_soft:
            return 0
        return min(amount, max(1, self.capacity)) if self.period is None else amount

    def level(self, used: int, at: int, *, now_ms: int) -> int:
        """The level at `now_ms`, if it was `used` at the stamp `at`."""
        if self.period is not None:
            return 0 if self.period.number(now_ms) > at else used
        return max(0, used - self.limit * max(0, now_ms - at))

    def wait_ms(self, level: int, amount: int, *, now_ms: int) -> int | None:
        """Milliseconds until `amount` fits if nothing else is taken: 0 if it fits now, None if it never will."""
        excess = level + self.need(amount) - self.capacity
        if excess <= 0 or self.is_soft or not self.holds(now_ms):
            return 0
        if self.period is None:
            return None if self.limit == 0 else -(-excess // self.limit)
        return None if amount > self.capacity else self.period.left_ms(now_ms)

    def __str__(self) -> str:
        if self.period is None:
            return f"{self.limit:,} {self.resource} a minute"
        cost = shown_cost(self.limit * COST_UNIT, self.descriptor.limits.currency)
        time = _shown_span(self.period) if isinstance(self.period, Span) else _A[self.period]
        return f"{cost} {time}{' (soft)' if self.is_soft else ''}"


_A = {Period.HOUR: "an hour", Period.DAY: "a day", Period.WEEK: "a week", Period.MONTH: "a month"}


def _shown_span(span: Span) -> str:
    if span.last_day is None:
        return f"for '{span}'"
    return f"for '{span}' until {datetime.fromtimestamp(span.last_day * DAY_MS // 1000, UTC):%Y-%m-%d}"


def shown_cost(cost: int, currency: str | None) -> str:
    """A cost in thousandths of a unit, exactly: 12.50 USD, 0.0015 USD, 1,234 units of cost."""
    amount, name = _amount(cost, currency)
    if currency is None:
        return f"{amount:,f} {name}"
    # two decimals, and more where they are not zero
    return f"{amount.quantize(_HUNDREDTH) if amount == round(amount, 2) else amount.normalize():,f} {name}"


def rounded_cost(cost: int, currency: str | None) -> str:
    """A cost in thousandths of a unit, to a hundredth, or two digits if it is less than a tenth: 12.35 USD,
    0.0015 USD, 1,234 units of cost."""
    amount, name = _amount(cost, currency)
    if currency is None and amount == amount.to_integral_value():
        return f"{amount:,.0f} {name}"
    small = _TWO_DIGITS.plus(amount)
    return f"{small:f} {name}" if 0 < small < _TENTH else f"{amount:,.2f} {name}"


_TENTH, _HUNDREDTH = Decimal("0.1"), Decimal("0.01")
_TWO_DIGITS = Context(prec=2)


def _amount(cost: int, currency: str | None) -> tuple[Decimal, str]:
    if currency is None:
        return Decimal(cost) / COST_UNIT, "units of cost"
    return Decimal(cost) / (COST_UNIT * CURRENCY_UNITS), currency


class Allowance(msgspec.Struct, frozen=True):
    """The state of one limit: its size, the amount left, and the seconds until it is full again if unused, None for
    never."""

    limit: int
    remaining: int
    reset_s: float | None


NEAR_PERCENT = 80
"""A budget is near its end when this much of it is used."""


class Near(msgspec.Struct, frozen=True):
    """A budget of which NEAR_PERCENT or more is used: its `level`, and whether it was reached, by this level or by a
    request that did not fit."""

    meter: Meter
    level: int
    is_reached: bool

    @property
    def percent(self) -> int:
        """The part that is used, rounded down."""
        return self.level * 100 // self.meter.capacity


class Standing(msgspec.Struct, frozen=True):
    """A caller's quota: for each resource, the limit with the least left. None for a resource without a limit. `near`
    are the budgets that are near their end."""

    requests: Allowance | None = None
    tokens: Allowance | None = None
    cost: Allowance | None = None
    near: tuple[Near, ...] = ()


class Reservation(msgspec.Struct, frozen=True):
    """The charge taken for one request before it runs. Settled once, with the actual charge.

    `levels` are the levels of its meters right after it. `is_local` is true if only this router's own share was
    checked, because the shared store was unavailable. `began_ms` is when it was granted, where another program counts:
    Unix time in milliseconds, 0 if unknown; `open` is then what open reservations have of each meter.

    `advance` is the part of the charge for requests to come. It is granted only where there is far more room.
    """

    id: str
    descriptors: tuple[Descriptor, ...]
    charge: Charge
    standing: Standing = Standing()
    levels: tuple[int, ...] = ()
    is_local: bool = False
    began_ms: int = 0
    open: tuple[int, ...] = ()
    advance: Charge = Charge()


class Refused(msgspec.Struct, frozen=True):
    """Nothing was taken. `meter` is the limit with the longest wait. After `retry_after_s` the same request passes if
    nothing else is taken; None if it never will. `advanced_ms`: for so long at most a router holds something of these
    limits in advance, which it may give back."""

    meter: Meter
    charge: Charge
    retry_after_s: float | None
    standing: Standing
    levels: tuple[int, ...] = ()
    is_local: bool = False
    advanced_ms: int = 0

    def error(self) -> QuotaExceeded:
        """The refusal as the error that the client receives."""
        meter = self.meter
        if self.retry_after_s is not None:
            hint = f"the same request fits in {rounded_seconds(self.retry_after_s)}"
            if self.is_local:
                hint += ", by this router's share, since the shared store is away"
            message = f"{meter.descriptor} has reached its limit of {meter}"
            return QuotaExceeded(message, hint=hint, retry_after_s=self.retry_after_s)
        if meter.period is not None and self.charge.cost <= meter.capacity:
            return QuotaExceeded(f"{meter.descriptor} has used its limit of {meter}", hint="ask the operator for more")
        cost = shown_cost(self.charge.cost, meter.descriptor.limits.currency)
        asked = f"it may cost {cost}" if meter.limit else "ask the operator"
        return QuotaExceeded(f"{meter.descriptor} may not do this at any time: its limit is {meter}", hint=asked)


class Settlement(enum.StrEnum):
    """The result of settling a reservation."""

    SETTLED = "settled"
    """The difference between the reserved and the actual charge was charged or given back."""
    LATE = "late"
    """The reservation no longer existed, so the whole actual charge was taken."""
    AGAIN = "again"
    """It was settled before: nothing changed."""


_made = lru_cache(maxsize=4096)(Descriptor)
"""Descriptors with their meters are made once and used by all requests."""


def descriptors(
    tenant: Tenant,
    model: str,
    key: Descriptor | None = None,
    *,
    team: Team | None = None,
    user: str | None = None,
    tags: Sequence[str] = (),
) -> tuple[Descriptor, ...]:
    """The descriptors of a request of `tenant` to `model`, with that `key`, of that `team` and end `user` and with
    those `tags`; it must keep the limits of all of them. The tenant's is the first."""
    name, above = tenant.name, None if tenant.organization is None else tenant.organization.name
    found = [_made(name, tenant.limits, organization=above)]
    if team is not None:
        found.append(_made(name, team.limits, team=team.name, organization=above))
    if tenant.model_limits or team is not None:
        found += at_model(tenant, model, team)
    if key is not None:
        found.append(key)
    for tag in tags:
        if (of_tag := tenant.tag_limits[tag]) != NO_LIMITS:
            found.append(_made(name, of_tag, tag=tag, organization=above))
    if user is not None and tenant.user_limits != NO_LIMITS:
        found.append(_made(name, tenant.user_limits, user=user, organization=above))
    if tenant.organization is not None:
        found.append(_made("", tenant.organization.limits, organization=above))
    return tuple(found)


def at_model(tenant: Tenant, model: str, team: Team | None = None) -> tuple[Descriptor, ...]:
    """The descriptors of the requests of `tenant` and its `team` to `model`, where they have limits of their own."""
    found: tuple[Descriptor, ...] = ()
    if model in tenant.model_limits:
        found += (_made(tenant.name, tenant.model_limits[model], model, organization=_above(tenant)),)
    if team is not None and model in team.model_limits:
        found += (_made(tenant.name, team.model_limits[model], model, team=team.name, organization=_above(tenant)),)
    return found


def of_key(tenant: Tenant, limits: Limits, key: str) -> Descriptor:
    """The descriptor of the key of `tenant` with the id `key`, which has `limits` of its own."""
    return _made(tenant.name, limits, key=key, organization=_above(tenant))


def _above(tenant: Tenant) -> str | None:
    return None if tenant.organization is None else tenant.organization.name


def meters(descriptors: Sequence[Descriptor]) -> tuple[Meter, ...]:
    """All limits of `descriptors` that are counted, in a fixed order. Empty if there is no limit."""
    if len(descriptors) == 1:
        return descriptors[0].meters
    return tuple([meter for one in descriptors for meter in one.meters])


def standing_of(
    metered: Sequence[Meter], levels: Sequence[int], reserved: Sequence[int] = (), *, now_ms: int
) -> Standing:
    """The quota of a caller with `metered` limits at these levels, of which open requests have `reserved`, most of
    which they will give back: of a budget counts what is settled."""
    tightest: dict[str, Allowance] = {}
    near: tuple[Near, ...] = ()
    for at, (meter, level) in enumerate(zip(metered, levels, strict=True)):
        if meter.period is not None and reserved:
            level = max(0, level - reserved[at])  # noqa: PLW2901
        left = max(0, meter.capacity - level)
        if meter.period is not None:
            if not meter.period.holds(now_ms):
                continue
            if level * 100 >= meter.capacity * NEAR_PERCENT and level:
                near += (Near(meter, level, level >= meter.capacity),)
            if meter.is_soft:
                continue
            full_ms = meter.period.left_ms(now_ms) if level else 0
            found = Allowance(meter.limit, left // COST_UNIT, None if full_ms is None else full_ms / 1000)
        else:
            reset_ms = -(-level // meter.limit) if meter.limit else 0
            found = Allowance(meter.limit, left // MINUTE_MS, reset_ms / 1000)
        known = tightest.get(meter.counts)
        if known is None or _tightness(found) < _tightness(known):
            tightest[meter.counts] = found
    return Standing(**tightest, near=near)


def _tightness(allowance: Allowance) -> tuple[int, float]:
    return allowance.remaining, -math.inf if allowance.reset_s is None else -allowance.reset_s


def refusal(
    metered: Sequence[Meter], levels: Sequence[int], charge: Charge, reserved: Sequence[int] = (), *, now_ms: int
) -> Refused | None:
    """The reason why `charge` does not fit on these levels, of which open requests have `reserved`; None if it fits."""
    binding: list[tuple[Meter, int | None]] = []
    for meter, level, amount in zip(metered, levels, charge.amounts(metered), strict=True):
        # an amount beyond the capacity may still fit: `wait_ms` says so
        if level + amount > meter.capacity and (wait := meter.wait_ms(level, amount, now_ms=now_ms)) != 0:
            binding.append((meter, wait))
    if not binding:
        return None
    meter, longest = max(binding, key=lambda pair: float("inf") if pair[1] is None else pair[1])
    retry_after_s = None if longest is None else longest / 1000
    standing = standing_of(metered, levels, reserved, now_ms=now_ms)
    refusing = {one.id for one, _ in binding}
    if any(one.meter.id in refusing for one in standing.near):
        near = tuple([replaced(one, is_reached=one.is_reached or one.meter.id in refusing) for one in standing.near])
        standing = replaced(standing, near=near)
    return Refused(meter, charge, retry_after_s, standing, tuple(levels))


def share(descriptor: Descriptor, replicas: int) -> Descriptor:
    """The limits that one of `replicas` routers may use on its own: an equal part of each, at least 1."""

    def part(limit: int | None) -> int | None:
        return limit if not limit else max(1, limit // replicas)

    limits = descriptor.limits
    parts = Limits(
        requests_per_minute=part(limits.requests_per_minute),
        tokens_per_minute=part(limits.tokens_per_minute),
        concurrent=limits.concurrent,
        cost_per_hour=part(limits.cost_per_hour),
        cost_per_day=part(limits.cost_per_day),
        cost_per_week=part(limits.cost_per_week),
        cost_per_month=part(limits.cost_per_month),
        currency=limits.currency,
        soft_cost_per_hour=part(limits.soft_cost_per_hour),
        soft_cost_per_day=part(limits.soft_cost_per_day),
        soft_cost_per_week=part(limits.soft_cost_per_week),
        soft_cost_per_month=part(limits.soft_cost_per_month),
        fixed=tuple([replace(budget, cost=max(1, budget.cost // replicas)) for budget in limits.fixed]),
    )
    return replace(descriptor, limits=parts)
