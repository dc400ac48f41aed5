"""Limits as meters: the callers they bind, the resource they count, how they refill, and what a response reports.

A rate (requests, tokens a minute) is the continuous-state leaky bucket of ITU-T I.371, the second form of the GCRA:
the level falls at the limit's rate, and a whole minute's limit may be taken at once. A budget (cost a day) is
counted from midnight to midnight UTC, as a bill is.

Everything is an integer, so that it balances to the unit: time in milliseconds, the level of a rate in 1/60,000 of its
resource (for a limit of 600 a minute the level falls by 600 each millisecond), the level of a budget in thousandths.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.errors import QuotaExceeded
from policies.nouns import Limits, Tenant
from policies.quantities import told_seconds
from policies.quota.charge import Charge

MINUTE_MS = 60_000
DAY_MS = 86_400_000
COST_UNIT = 1000


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
    """The callers that `limits` bind: a tenant, a tenant at one model, or one of its keys, by the key's id."""

    tenant: str
    limits: Limits
    model: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        of_key = "" if self.key is None else f"key {self.key} of "
        return f"{of_key}tenant '{self.tenant}'" + ("" if self.model is None else f" at model '{self.model}'")

    @property
    def scope(self) -> str:
        """The part of a meter's name that tells the descriptors of one tenant apart; empty for the tenant itself."""
        of_key = "" if self.key is None else f"@{self.key}"
        return of_key + ("" if self.model is None else f":{self.model}")


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit of one descriptor. `limit` is in the units of the SLA file: requests, tokens, units of cost."""

    descriptor: Descriptor
    resource: Resource
    limit: int

    @property
    def name(self) -> str:
        """Unique among the meters of one tenant, and unchanged when the limit changes."""
        return f"{self.resource}{self.descriptor.scope}"

    @property
    def is_daily(self) -> bool:
        """Is it a daily budget rather than a rate?"""
        return self.resource is Resource.COST

    @property
    def rate(self) -> int:
        """Amount by which the level falls each millisecond; 0 for a budget."""
        return 0 if self.is_daily else self.limit

    @property
    def capacity(self) -> int:
        """The level at which nothing is left."""
        return self.limit * (COST_UNIT if self.is_daily else MINUTE_MS)

    def amount(self, charge: Charge) -> int:
        """The amount by which `charge` raises the level."""
        if self.is_daily:
            return charge.cost
        return MINUTE_MS * (charge.requests if self.resource is Resource.REQUESTS else charge.tokens)

    def need(self, amount: int) -> int:
        """The room that must be free for `amount` to be admitted.

        A rate limits speed, not size: an amount above a whole minute's limit is admitted when the meter is empty, and
        the next request waits until the debt is gone. A budget is never overdrawn knowingly.
        """
        return amount if self.is_daily else min(amount, max(1, self.capacity))

    def stamp(self, now_ms: int) -> int:
        """The time stamp of a level taken at `now_ms`: the millisecond for a rate, the day for a budget."""
        return now_ms // DAY_MS if self.is_daily else now_ms

    def level(self, used: int, at: int, *, now_ms: int) -> int:
        """The level at `now_ms`, if it was `used` at the stamp `at`."""
        elapsed = max(0, self.stamp(now_ms) - at)
        if self.is_daily:
            return 0 if elapsed else used
        return max(0, used - self.rate * elapsed)

    def wait_ms(self, level: int, amount: int, *, now_ms: int) -> int | None:
        """Milliseconds until `amount` fits if nothing else is taken: 0 if it fits now, None if it never will."""
        excess = level + self.need(amount) - self.capacity
        if excess <= 0:
            return 0
        if not self.is_daily:
            return None if self.limit == 0 else -(-excess // self.limit)
        return None if amount > self.capacity else DAY_MS - now_ms % DAY_MS

    def allowance(self, level: int, *, now_ms: int) -> Allowance:
        """The amount that is left and the time until all of it is back."""
        remaining = max(0, self.capacity - level) // (COST_UNIT if self.is_daily else MINUTE_MS)
        if self.is_daily:
            reset_ms = DAY_MS - now_ms % DAY_MS if level else 0
        else:
            reset_ms = -(-level // self.limit) if self.limit else 0
        return Allowance(self.limit, remaining, reset_ms / 1000)


@dataclass(frozen=True, slots=True)
class Allowance:
    """The state of one limit: its size, the amount left, and the seconds until it is full again if unused."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """A caller's quota: for each resource, the limit with the least left. None for a resource without a limit."""

    requests: Allowance | None = None
    tokens: Allowance | None = None
    cost: Allowance | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
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


@dataclass(frozen=True, slots=True)
class Refused:
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
            hint = f"the same request fits in {told_seconds(self.retry_after_s)}"
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


def descriptors(tenant: Tenant, model: str, key: Descriptor | None = None) -> tuple[Descriptor, ...]:
    """The descriptors of a request of `tenant` to `model`, with that `key`; it must keep the limits of all of them."""
    found = [Descriptor(tenant.name, tenant.limits)]
    if model in tenant.model_limits:
        found.append(Descriptor(tenant.name, tenant.model_limits[model], model))
    return (*found, key) if key is not None else tuple(found)


def meters(descriptors: Sequence[Descriptor]) -> tuple[Meter, ...]:
    """All limits of `descriptors` that are counted, in a fixed order. Empty if there is no limit."""
    return tuple(
        Meter(descriptor, resource, limit)
        for descriptor in descriptors
        for resource, limit in (
            (Resource.REQUESTS, descriptor.limits.requests_per_minute),
            (Resource.TOKENS, descriptor.limits.tokens_per_minute),
            (Resource.COST, descriptor.limits.cost_per_day),
        )
        if limit is not None
    )


def standing_of(levels: Sequence[tuple[Meter, int]], *, now_ms: int) -> Standing:
    """The quota of a caller with meters at these levels."""
    tightest: dict[Resource, Allowance] = {}
    for meter, level in levels:
        found = meter.allowance(level, now_ms=now_ms)
        known = tightest.get(meter.resource)
        if known is None or (found.remaining, -found.reset_s) < (known.remaining, -known.reset_s):
            tightest[meter.resource] = found
    return Standing(**{str(resource): allowance for resource, allowance in tightest.items()})


def refusal(levels: Sequence[tuple[Meter, int]], charge: Charge, *, now_ms: int) -> Refused | None:
    """The reason why `charge` does not fit on these levels; None if it fits."""
    waits = [(meter, meter.wait_ms(level, meter.amount(charge), now_ms=now_ms)) for meter, level in levels]
    binding = [(meter, wait) for meter, wait in waits if wait != 0]
    if not binding:
        return None
    meter, wait = max(binding, key=lambda pair: float("inf") if pair[1] is None else pair[1])
    retry_after_s = None if wait is None else wait / 1000
    standing = standing_of(levels, now_ms=now_ms)
    return Refused(meter, charge, retry_after_s, standing, tuple(level for _, level in levels))


def granted(asked: Reservation, levels: Sequence[tuple[Meter, int]], *, now_ms: int) -> Reservation:
    """`asked` as granted, with the levels of its meters after it."""
    standing = standing_of(levels, now_ms=now_ms)
    return replace(asked, standing=standing, levels=tuple(level for _, level in levels))


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
