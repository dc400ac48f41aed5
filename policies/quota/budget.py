"""Limits as meters, and what a request is charged: estimated before it runs, exact afterwards.

A rate (requests, tokens a minute) is the continuous-state leaky bucket of ITU-T I.371, the second form of the GCRA:
the level falls at the limit's rate, and a whole minute's limit may be taken at once. A budget (cost a day) is
counted from midnight to midnight UTC, as a bill is.

Everything is an integer, so that it balances to the unit: time in milliseconds, the level of a rate in 1/60,000 of its
resource (for a limit of 600 a minute the level falls by 600 each millisecond), the level of a budget in thousandths.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec

from policies.errors import QuotaExceeded
from policies.nouns import Limits, Prices, Tenant, Usage
from policies.quantities import MOST_PER_TOKEN, rounded_seconds

MINUTE_MS = 60_000
DAY_MS = 86_400_000
COST_UNIT = 1000

ANSWER_TOKENS = 1024
"""Most tokens of an answer that are reserved. Clients ask for the longest possible answer and stop far sooner; a longer
one is charged when it ends, into debt if necessary. 1024 is also what LiteLLM reserves for an unknown answer."""

MOST_TOKENS = 10**9
"""More tokens than any request has: larger reports of a backend are cut to this. Keeps levels far below 2**53."""


class Charge(msgspec.Struct, frozen=True):
    """The charge of one request, never negative. `tokens` are those that are computed: uncached prompt and answer.
    `cost` is in thousandths of the unit of `Prices`, so that sums are exact."""

    requests: int = 0
    tokens: int = 0
    cost: int = 0

    def amounts(self, metered: Sequence[Meter]) -> list[int]:
        """The amounts by which this raises the levels of `metered`."""
        found = []
        for meter in metered:
            found.append(meter.unit * getattr(self, meter.counts))  # noqa: PERF401 - a comprehension is a call more
        return found


def charge_of(usage: Usage, prices: Prices) -> Charge:
    """The actual charge of a request that ended, in whatever way, with `usage`."""
    prompt = min(max(0, usage.prompt_tokens), MOST_TOKENS)
    cached = min(max(0, usage.cached_tokens), prompt)
    output = min(max(0, usage.completion_tokens), MOST_TOKENS)
    for_uncached, for_cached, for_output = _per_token(prices)
    cost = (prompt - cached) * for_uncached + cached * for_cached + output * for_output
    return Charge(1, prompt - cached + output, cost)


def estimate(
    prompt_tokens: int, *, uncached_tokens: int | None, max_new_tokens: int, choices: int = 1, prices: Prices
) -> Charge:
    """The charge to reserve for one request: the estimated uncached part of its prompt (None: all of it), and for each
    of its `choices` an answer of `max_new_tokens` or ANSWER_TOKENS, whichever is shorter."""
    cached = 0 if uncached_tokens is None else prompt_tokens - uncached_tokens
    return charge_of(Usage(prompt_tokens, min(max_new_tokens, ANSWER_TOKENS) * choices, cached), prices)


@lru_cache(maxsize=64)
def _per_token(prices: Prices) -> tuple[int, int, int]:
    """Prices of an uncached, a cached and a drawn token, in thousandths of a unit, at most MOST_PER_TOKEN."""
    uncached, cached, output = (
        min(MOST_PER_TOKEN, round(price * 1000)) for price in (prices.uncached, prices.cached, prices.output)
    )
    return uncached, cached, output


class Resource(enum.StrEnum):
    """The resource that a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    COST = "cost"


_LIMITED = {
    Resource.REQUESTS: "requests a minute",
    Resource.TOKENS: "tokens a minute",
    Resource.COST: "units of cost a day",
}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The callers that `limits` bind: a tenant, a tenant at one model, or one of its keys, by the key's id.

    `scope` is the part of a meter's name that tells the descriptors of one tenant apart; empty for the tenant itself.
    `id` tells all descriptors apart. `meters` are the limits that are counted, in a fixed order.
    """

    tenant: str
    limits: Limits
    model: str | None = None
    key: str | None = None
    scope: str = field(init=False, compare=False, repr=False)
    id: tuple[str, str] = field(init=False, compare=False, repr=False)
    meters: tuple[Meter, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        of_key = "" if self.key is None else f"@{self.key}"
        limits = self.limits
        counted = (
            (Resource.REQUESTS, limits.requests_per_minute),
            (Resource.TOKENS, limits.tokens_per_minute),
            (Resource.COST, limits.cost_per_day),
        )
        scope = of_key + ("" if self.model is None else f":{self.model}")
        object.__setattr__(self, "scope", scope)
        object.__setattr__(self, "id", (self.tenant, scope))
        found = tuple(Meter(self, resource, limit) for resource, limit in counted if limit is not None)
        object.__setattr__(self, "meters", found)

    def __str__(self) -> str:
        of_key = "" if self.key is None else f"key {self.key} of "
        return f"{of_key}tenant '{self.tenant}'" + ("" if self.model is None else f" at model '{self.model}'")


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit of one descriptor. `limit` is in the units of the SLA file: requests, tokens, units of cost.

    `name` is unique among the meters of one tenant, and unchanged when the limit changes; `id` is unique among all
    meters. `is_daily`: it is a daily budget rather than a rate. The level falls by `rate` each millisecond, 0 for a
    budget; at the level `capacity` nothing is left. A level has a stamp, the number of whole `stamp_ms` since 1970:
    milliseconds for a rate, days for a budget. A charge raises it by `unit` times its member named `counts`.
    """

    descriptor: Descriptor
    resource: Resource
    limit: int
    name: str = field(init=False, compare=False, repr=False)
    id: tuple[str, str] = field(init=False, compare=False, repr=False)
    is_daily: bool = field(init=False, compare=False, repr=False)
    rate: int = field(init=False, compare=False, repr=False)
    stamp_ms: int = field(init=False, compare=False, repr=False)
    unit: int = field(init=False, compare=False, repr=False)
    capacity: int = field(init=False, compare=False, repr=False)
    counts: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        is_daily = self.resource is Resource.COST
        name = f"{self.resource}{self.descriptor.scope}"
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "id", (self.descriptor.tenant, name))
        object.__setattr__(self, "is_daily", is_daily)
        object.__setattr__(self, "rate", 0 if is_daily else self.limit)
        object.__setattr__(self, "stamp_ms", DAY_MS if is_daily else 1)
        object.__setattr__(self, "unit", 1 if is_daily else MINUTE_MS)
        object.__setattr__(self, "capacity", self.limit * (COST_UNIT if is_daily else MINUTE_MS))
        object.__setattr__(self, "counts", self.resource.value)

    def need(self, amount: int) -> int:
        """The room that must be free for `amount` to be admitted.

        A rate limits speed, not size: an amount above a whole minute's limit is admitted when the meter is empty, and
        the next request waits until the debt is gone. A budget is never overdrawn knowingly.
        """
        return amount if self.is_daily else min(amount, max(1, self.capacity))

    def level(self, used: int, at: int, *, now_ms: int) -> int:
        """The level at `now_ms`, if it was `used` at the stamp `at`."""
        if self.is_daily:
            return 0 if now_ms // DAY_MS > at else used
        return max(0, used - self.limit * max(0, now_ms - at))

    def wait_ms(self, level: int, amount: int, *, now_ms: int) -> int | None:
        """Milliseconds until `amount` fits if nothing else is taken: 0 if it fits now, None if it never will."""
        excess = level + self.need(amount) - self.capacity
        if excess <= 0:
            return 0
        if not self.is_daily:
            return None if self.limit == 0 else -(-excess // self.limit)
        return None if amount > self.capacity else DAY_MS - now_ms % DAY_MS


class Allowance(msgspec.Struct, frozen=True):
    """The state of one limit: its size, the amount left, and the seconds until it is full again if unused."""

    limit: int
    remaining: int
    reset_s: float


class Standing(msgspec.Struct, frozen=True):
    """A caller's quota: for each resource, the limit with the least left. None for a resource without a limit."""

    requests: Allowance | None = None
    tokens: Allowance | None = None
    cost: Allowance | None = None


class Reservation(msgspec.Struct, frozen=True):
    """The charge taken for one request before it runs. Settled once, with the actual charge.

    `levels` are the levels of its meters right after it. `is_local` is true if only this router's own share was
    checked, because the shared store was unavailable.
    """

    id: str
    descriptors: tuple[Descriptor, ...]
    charge: Charge
    standing: Standing = Standing()
    levels: tuple[int, ...] = ()
    is_local: bool = False


class Refused(msgspec.Struct, frozen=True):
    """Nothing was taken. `meter` is the limit with the longest wait. After `retry_after_s` the same request passes if
    nothing else is taken; None if it never will."""

    meter: Meter
    charge: Charge
    retry_after_s: float | None
    standing: Standing
    levels: tuple[int, ...] = ()
    is_local: bool = False

    def error(self) -> QuotaExceeded:
        """The refusal as the error that the client receives."""
        meter = self.meter
        limit = f"{meter.limit:,} {_LIMITED[meter.resource]}"
        if self.retry_after_s is not None:
            hint = f"the same request fits in {rounded_seconds(self.retry_after_s)}"
            if self.is_local:
                hint += ", by this router's share, since the shared store is away"
            message = f"{meter.descriptor} has reached its limit of {limit}"
            return QuotaExceeded(message, hint=hint, retry_after_s=self.retry_after_s)
        asked = f"it may cost {self.charge.cost / COST_UNIT:,.3f}" if meter.limit else "ask the operator"
        return QuotaExceeded(f"{meter.descriptor} may not do this at any time: its limit is {limit}", hint=asked)


class Settlement(enum.StrEnum):
    """The result of settling a reservation."""

    SETTLED = "settled"
    """The difference between the reserved and the actual charge was charged or given back."""
    LATE = "late"
    """The reservation no longer existed, so the whole actual charge was taken."""
    AGAIN = "again"
    """It was settled before: nothing changed."""


@lru_cache(maxsize=4096)
def descriptor(tenant: str, limits: Limits, model: str | None = None, key: str | None = None) -> Descriptor:
    """The Descriptor of these callers. Its meters are made once and used by all requests."""
    return Descriptor(tenant, limits, model, key)


def descriptors(tenant: Tenant, model: str, key: Descriptor | None = None) -> tuple[Descriptor, ...]:
    """The descriptors of a request of `tenant` to `model`, with that `key`; it must keep the limits of all of them."""
    found: tuple[Descriptor, ...] = (descriptor(tenant.name, tenant.limits),)
    if model in tenant.model_limits:
        found += (descriptor(tenant.name, tenant.model_limits[model], model),)
    return found if key is None else (*found, key)


def meters(descriptors: Sequence[Descriptor]) -> tuple[Meter, ...]:
    """All limits of `descriptors` that are counted, in a fixed order. Empty if there is no limit."""
    if len(descriptors) == 1:
        return descriptors[0].meters
    return tuple([meter for one in descriptors for meter in one.meters])


def standing_of(metered: Sequence[Meter], levels: Sequence[int], *, now_ms: int) -> Standing:
    """The quota of a caller with `metered` limits at these levels."""
    tightest: dict[str, Allowance] = {}
    for meter, level in zip(metered, levels, strict=True):
        left = max(0, meter.capacity - level)
        if meter.is_daily:
            reset_ms = DAY_MS - now_ms % DAY_MS if level else 0
            found = Allowance(meter.limit, left // COST_UNIT, reset_ms / 1000)
        else:
            reset_ms = -(-level // meter.limit) if meter.limit else 0
            found = Allowance(meter.limit, left // MINUTE_MS, reset_ms / 1000)
        known = tightest.get(meter.counts)
        if known is None or (found.remaining, -found.reset_s) < (known.remaining, -known.reset_s):
            tightest[meter.counts] = found
    return Standing(**tightest)


def refusal(metered: Sequence[Meter], levels: Sequence[int], charge: Charge, *, now_ms: int) -> Refused | None:
    """The reason why `charge` does not fit on these levels; None if it fits."""
    binding: list[tuple[Meter, int | None]] = []
    for meter, level, amount in zip(metered, levels, charge.amounts(metered), strict=True):
        # an amount beyond the capacity may still fit: `wait_ms` says so
        if level + amount > meter.capacity and (wait := meter.wait_ms(level, amount, now_ms=now_ms)) != 0:
            binding.append((meter, wait))
    if not binding:
        return None
    meter, longest = max(binding, key=lambda pair: float("inf") if pair[1] is None else pair[1])
    retry_after_s = None if longest is None else longest / 1000
    return Refused(meter, charge, retry_after_s, standing_of(metered, levels, now_ms=now_ms), tuple(levels))


def granted(asked: Reservation, levels: Sequence[int], *, now_ms: int) -> Reservation:
    """`asked` as granted, with the levels of its meters after it."""
    standing = standing_of(meters(asked.descriptors), levels, now_ms=now_ms)
    return Reservation(asked.id, asked.descriptors, asked.charge, standing, tuple(levels), asked.is_local)


def share(descriptor: Descriptor, replicas: int) -> Descriptor:
    """The limits that one of `replicas` routers may use on its own: an equal part of each, at least 1."""

    def part(limit: int | None) -> int | None:
        return limit if not limit else max(1, limit // replicas)

    limits = descriptor.limits
    parts = Limits(
        requests_per_minute=part(limits.requests_per_minute),
        tokens_per_minute=part(limits.tokens_per_minute),
        concurrent=limits.concurrent,
        cost_per_day=part(limits.cost_per_day),
    )
    return replace(descriptor, limits=parts)
