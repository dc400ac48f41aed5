"""Budgets and what is used of them, for the dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice

from policies.keys import id_of
from policies.nouns import Tenant
from policies.quota.budget import Descriptor, Meter, at_model, descriptors, meters, of_key, rounded_cost, shown_cost
from policies.quota.periods import Period, Span
from router.shared.keys.ring import KeyRing
from router.shared.store.base import QuotaStore, StoreFailed

MOST_SHOWN = 200
MOST_READ = 2000
"""Most callers that are read for one reply."""

_AT_ONCE = 200
"""Callers of one ledger that are read with one call of the store."""


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One budget of an organization, tenant, team, key, tag or model: `kind` says which, `name` its name or the key's
    id.

    `limit` is a cost as people read it, `used` one that is rounded, `share` is the used part, above 1 if overdrawn;
    `used` and `share` are None while the store of quotas is away. `period` is hour, day, week or month, or the name of
    a fixed period; it ends in `left_s`, None: never. If it `is_renewed`, the budget is whole again then.
    """

    id: str
    kind: str
    name: str
    tenant: str | None
    team: str | None
    model: str | None
    limit: str
    used: str | None
    share: float | None
    period: str
    is_soft: bool
    is_renewed: bool
    left_s: float | None


@dataclass(frozen=True, slots=True)
class Budgets:
    """The first MOST_SHOWN of `all` budgets that were read, those with the largest used part first.

    `is_whole` is false if there were too many callers to read all.
    """

    budgets: tuple[BudgetRow, ...]
    all: int
    is_whole: bool


async def budgets_of(
    tenants: Mapping[str, Tenant], store: QuotaStore, keys: KeyRing | None, unix_time: Callable[[], float]
) -> Budgets:
    """The budgets of `tenants` and of `keys`, where there are any, that are in force, with their levels in `store`;
    without those of end users, of which there may be very many."""
    payers = _payers(tenants, keys)
    by_ledger: dict[str, list[Descriptor]] = {}
    for payer in {payer.id: payer for payer in islice(payers, MOST_READ)}.values():
        by_ledger.setdefault(payer.ledger, []).append(payer)
    parts = [some[at : at + _AT_ONCE] for some in by_ledger.values() for at in range(0, len(some), _AT_ONCE)]
    found: list[tuple[Meter, int | None]] = []
    for part in parts:
        # one after the other, and other tasks between them: requests come first at the store and here
        found += await _levels(part, store)
        await asyncio.sleep(0)
    now_ms = int(unix_time() * 1000)
    in_force = [(meter, level) for meter, level in found if meter.period is not None and meter.holds(now_ms)]
    # texts only for those that are shown: most of the time would go there
    first = nsmallest(MOST_SHOWN, in_force, key=lambda pair: (-(pair[1] or 0) / max(1, pair[0].capacity), pair[0].id))
    rows = [_row(meter, meter.period, level, now_ms) for meter, level in first if meter.period is not None]
    return Budgets(tuple(rows), len(in_force), next(payers, None) is None)


def _payers(tenants: Mapping[str, Tenant], keys: KeyRing | None) -> Iterator[Descriptor]:
    """The callers with a budget, some of them repeatedly; keys last."""
    for tenant in tenants.values():
        yield from _with_budget(_parts(tenant))
    if keys is None:
        return
    for tenant in tenants.values():
        yield from _with_budget(of_key(tenant, limits, id_of(digest)) for digest, limits in tenant.key_limits.items())
    for key in keys.all():
        owner = tenants.get(key.tenant)
        if owner is not None and key.limits is not None and not key.has_expired(keys.now()):
            yield from _with_budget([of_key(owner, key.limits, key.id)])


def _parts(tenant: Tenant) -> Iterator[Descriptor]:
    yield from descriptors(tenant, "", tags=tuple(tenant.tag_limits))
    for model in tenant.model_limits:
        yield from at_model(tenant, model)
    for team in tenant.teams.values():
        yield from descriptors(tenant, "", team=team)
        for model in team.model_limits:
            yield from at_model(tenant, model, team)


def _with_budget(payers: Iterable[Descriptor]) -> Iterator[Descriptor]:
    return (payer for payer in payers if any(meter.period is not None for meter in payer.meters))


async def _levels(payers: Sequence[Descriptor], store: QuotaStore) -> list[tuple[Meter, int | None]]:
    """The meters of `payers`, which have one ledger, with their levels; None while the store is away."""
    metered = meters(payers)
    try:
        return list(zip(metered, await store.levels(payers), strict=True))
    except StoreFailed:
        return [(meter, None) for meter in metered]


def _row(meter: Meter, period: Period | Span, level: int | None, now_ms: int) -> BudgetRow:
    payer, left_ms = meter.descriptor, period.left_ms(now_ms)
    names = (payer.key, payer.tag, payer.model, payer.team, payer.tenant or payer.organization)
    return BudgetRow(
        id=" ".join(meter.id),
        kind=payer.kind,
        name=next(name for name in names if name is not None),
        tenant=payer.tenant or None,
        team=payer.team,
        model=payer.model,
        limit=shown_cost(meter.capacity, payer.limits.currency),
        used=None if level is None else rounded_cost(level, payer.limits.currency),
        share=None if level is None else level / max(1, meter.capacity),
        period=str(period),
        is_soft=meter.is_soft,
        is_renewed=isinstance(period, Period),
        left_s=None if left_ms is None else left_ms / 1000,
    )
