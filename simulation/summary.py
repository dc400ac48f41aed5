"""The results of a simulation: each class with its targets, each tenant, each pool and backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from policies.errors import NoBackend, Overloaded, QuotaExceeded
from policies.nouns import Outcome, ServiceClass
from policies.quota.budget import charge_of
from policies.sla.config import Config
from simulation.client import Call
from simulation.engine import Work
from simulation.replay import Agreement
from simulation.run import Backend, Run

_REFUSED = {Overloaded.code, NoBackend.code}
_DEADLINE_QUANTILE = 0.95
"""Share of requests with a deadline that should meet it."""


class Spread(msgspec.Struct, frozen=True):
    """Quantiles of a time in seconds; nearest rank, so each is an observed value."""

    p50: float
    p95: float
    p99: float


class ClassSummary(msgspec.Struct, frozen=True):
    """One service class. `refused` for lack of room, `limited` by their tenant's limits, `failed` otherwise.

    `missed` is the share of requests, without `limited` ones, that missed the TTFT target or the deadline,
    rejected ones included; `slow` is the share of answers slower than the TPOT
    target. None if the class has no such target. `fetched` requests had KV fetched from another cache, `apart` their
    prompts computed by another pool. `keeps`: both are within the target's quantile.
    """

    name: str
    requests: int
    finished: int
    refused: int
    limited: int
    failed: int
    ttft_s: Spread | None
    ttft_target_s: float | None
    deadline_s: float | None
    missed: float | None
    tpot_s: Spread | None
    tpot_target_s: float | None
    slow: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    fetched: int
    apart: int
    keeps: bool | None


class TenantSummary(msgspec.Struct, frozen=True):
    """One tenant. `spend` is in the units of the file's `cost`, millionths of its currency if it has one, `share`
    its part of all tenants' spend."""

    name: str
    requests: int
    share: float
    spend: float
    prompt_tokens: int
    completion_tokens: int
    refused: int
    limited: int


class BackendSummary(msgspec.Struct, frozen=True):
    """One backend, or a pool of `backends` backends. `utilisation`: the share of time with a running step.

    `hit_rate` is the share of prompt tokens that were in the cache, `queue_s` the mean time that its requests
    waited in the router. `cached_tokens` includes `fetched_tokens` from other backends.
    """

    name: str
    pool: str
    backends: int
    requests: int
    utilisation: float
    hit_rate: float
    queue_s: float
    prompt_tokens: int
    cached_tokens: int
    drawn_tokens: int
    preemptions: int
    fetched_tokens: int


class Summary(msgspec.Struct, frozen=True):
    """One simulation. `notes` say how many requests could not be judged, or only roughly. `steps` counts the
    tries of `on_miss`, as (class, step, times).
    """

    config: str
    requests: int
    seconds: float
    keeps: bool
    classes: tuple[ClassSummary, ...]
    tenants: tuple[TenantSummary, ...]
    pools: tuple[BackendSummary, ...]
    backends: tuple[BackendSummary, ...]
    steps: tuple[tuple[str, str, int], ...]
    agreement: Agreement | None = None
    currency: str | None = None
    notes: tuple[str, ...] = ()


def summary_of(run: Run, agreement: Agreement | None = None, *, guessed: int = 0) -> Summary:
    """The results of `run`, and its agreement with the log that it replayed, if it did. Pure.

    The log had no answer of `guessed` requests.
    """
    config, calls = run.config, run.calls
    names = [*config.classes, *sorted({call.service_class for call in calls} - config.classes.keys())]
    classes = tuple(_class_row(name, _of(calls, lambda c: c.service_class, name), config) for name in names)
    backends = tuple(_backend_row(backend, calls, run.seconds) for backend in run.backends)
    rows = tuple(row for row in classes if row.requests)
    return Summary(
        config=config.version,
        requests=len(calls),
        seconds=round(run.seconds, 6),
        keeps=all(row.keeps is not False for row in rows),
        classes=rows,
        tenants=_tenant_rows(calls, config),
        pools=tuple(_pool_row(pool, run) for pool in config.pools if run.fleet.counts[pool]),
        backends=backends,
        steps=tuple((*names, count) for names, count in sorted(run.steps.items())),
        agreement=agreement,
        currency=config.prices.currency,
        notes=tuple(_notes(calls, rows, guessed)),
    )


def _notes(calls: Sequence[Call], classes: Sequence[ClassSummary], guessed: int) -> Iterator[str]:
    """How many requests cannot be judged, and why."""
    aimless = [row for row in classes if row.keeps is None]
    if count := sum(row.requests for row in aimless):
        yield f"{count:,} requests are judged by no target: {', '.join(row.name for row in aimless)} has none"
    if guessed:
        yield f"{guessed:,} requests have no answer in the log: theirs are taken to be as long as the class's mean"
    if count := sum(not call.arrival.chunks for call in calls):
        yield f"{count:,} prompts have no keys: no cache can have any of them, so their prefill is the longest possible"


def spread_of(seconds: Iterable[float | None]) -> Spread | None:
    """The quantiles of the known values; None without any."""
    known = sorted(value for value in seconds if value is not None)
    if not known:
        return None
    return Spread(*(round(known[max(0, math.ceil(share * len(known)) - 1)], 6) for share in (0.5, 0.95, 0.99)))


def _of(calls: Iterable[Call], key: Callable[[Call], str], name: str) -> list[Call]:
    return [call for call in calls if key(call) == name]


def _class_row(name: str, calls: Sequence[Call], config: Config) -> ClassSummary:
    promised = config.classes.get(name, ServiceClass(name, 0))
    refused, limited = _count(calls, _is_refused), _count(calls, _is_limited)
    finished = _count(calls, lambda call: call.outcome is Outcome.FINISHED)
    counted = [call for call in calls if not _is_limited(call)]
    answered = [call.tpot_s for call in calls if call.tpot_s is not None]
    missed = _share(counted, lambda call: _missed(call, promised))
    slow = _share(answered, lambda tpot_s: promised.tpot_s is not None and tpot_s > promised.tpot_s)
    promises_ttft = promised.ttft_s is not None or promised.deadline_s is not None
    quantile = promised.ttft_quantile if promised.ttft_s is not None else _DEADLINE_QUANTILE
    kept = [share <= 1 - least + 1e-9 for share, least in _promises(promised, missed, slow, quantile)]
    return ClassSummary(
        name=name,
        requests=len(calls),
        finished=finished,
        refused=refused,
        limited=limited,
        failed=len(calls) - finished - refused - limited,
        ttft_s=spread_of(call.ttft_s for call in calls),
        ttft_target_s=promised.ttft_s,
        deadline_s=promised.deadline_s,
        missed=missed if promises_ttft else None,
        tpot_s=spread_of(answered),
        tpot_target_s=promised.tpot_s,
        slow=slow if promised.tpot_s is not None else None,
        prompt_tokens=sum(call.usage.prompt_tokens for call in calls),
        cached_tokens=sum(call.usage.cached_tokens for call in calls),
        completion_tokens=sum(call.usage.completion_tokens for call in calls),
        fetched=_count(calls, lambda call: call.fetch is not None),
        apart=_count(calls, lambda call: call.prefill is not None),
        keeps=all(kept) if kept else None,
    )


def _promises(promised: ServiceClass, missed: float, slow: float, quantile: float) -> Iterable[tuple[float, float]]:
    """The share that missed each target, and the share that should meet it."""
    if promised.ttft_s is not None or promised.deadline_s is not None:
        yield missed, quantile
    if promised.tpot_s is not None:
        yield slow, promised.tpot_quantile


def _missed(call: Call, promised: ServiceClass) -> bool:
    late = promised.ttft_s is not None and (call.ttft_s is None or call.ttft_s > promised.ttft_s)
    if promised.deadline_s is None:
        return late
    is_whole = call.outcome is Outcome.FINISHED and call.ended_s is not None
    return late or not (is_whole and (call.ended_s or 0.0) - call.arrival.at_s <= promised.deadline_s)


def _tenant_rows(calls: Sequence[Call], config: Config) -> tuple[TenantSummary, ...]:
    names = [name for name in config.tenants if any(call.tenant == name for call in calls)]
    names += sorted({call.tenant for call in calls} - set(names))
    spends = {name: _spend(_of(calls, lambda call: call.tenant, name), config) for name in names}
    whole = sum(spends.values()) or 1.0
    rows = []
    for name in names:
        own = _of(calls, lambda call: call.tenant, name)
        rows.append(
            TenantSummary(
                name=name,
                requests=len(own),
                share=round(spends[name] / whole, 6),
                spend=spends[name],
                prompt_tokens=sum(call.usage.prompt_tokens for call in own),
                completion_tokens=sum(call.usage.completion_tokens for call in own),
                refused=_count(own, _is_refused),
                limited=_count(own, _is_limited),
            )
        )
    return tuple(rows)


def _spend(calls: Iterable[Call], config: Config) -> float:
    return (
        sum(charge_of(call.usage, config.prices.of(call.arrival.model or "", call.pool or "")).cost for call in calls)
        / 1000
    )


def _pool_row(pool: str, run: Run) -> BackendSummary:
    members = [backend for backend in run.backends if backend.pool == pool]
    calls = [call for call in run.calls if call.pool == pool]
    names = Work.__dataclass_fields__
    work = Work(**{name: sum(getattr(backend.work, name) for backend in members) for name in names})
    return _row(pool, pool, calls, work, backends=len(members), seconds=run.seconds)


def _backend_row(backend: Backend, calls: Sequence[Call], seconds: float) -> BackendSummary:
    own = [call for call in calls if call.backend == backend.name]
    return _row(backend.name, backend.pool, own, backend.work, backends=1, seconds=seconds)


def _row(name: str, pool: str, calls: Sequence[Call], work: Work, *, backends: int, seconds: float) -> BackendSummary:
    # the clock adds up floats, so that it may show a hair less than the time of the arrival
    waits = [max(0.0, call.placed_s - call.arrival.at_s) for call in calls if call.placed_s is not None]
    asked = work.prompt_tokens + work.cached_tokens
    return BackendSummary(
        name=name,
        pool=pool,
        backends=backends,
        requests=len(calls),
        utilisation=round(work.busy_s / max(1e-9, seconds * backends), 6),
        hit_rate=round(work.cached_tokens / max(1, asked), 6),
        queue_s=round(sum(waits) / max(1, len(waits)), 6),
        prompt_tokens=work.prompt_tokens,
        cached_tokens=work.cached_tokens,
        drawn_tokens=work.drawn_tokens,
        preemptions=work.preemptions,
        fetched_tokens=work.fetched_tokens,
    )


def _share(things: Sequence[object], question: Callable[..., bool]) -> float:
    return round(sum(map(question, things)) / len(things), 6) if things else 0.0


def _count(calls: Iterable[Call], question: Callable[[Call], bool]) -> int:
    return sum(map(question, calls))


def _is_refused(call: Call) -> bool:
    return call.code in _REFUSED


def _is_limited(call: Call) -> bool:
    return call.code == QuotaExceeded.code
