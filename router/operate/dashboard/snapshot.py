"""Builds the dashboard's records from the router's parts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from heapq import nsmallest
from itertools import islice

from policies.health import Trouble
from policies.nouns import BackendView, Request, ServiceClass, Tenant
from policies.objections import worded
from policies.prefix.parity import ParityReport, Trust
from policies.quota.budget import COST_UNIT, descriptors, meters, rounded_cost
from router.call.gateway import Gateway
from router.call.mirrors import Compared
from router.call.splits import Standing
from router.fleet.prompt_keys import PromptKeys
from router.operate.dashboard.batch_row import MOST_SHOWN, batch_rows
from router.operate.dashboard.board import Row, Totals
from router.operate.dashboard.nouns import (
    BackendRow,
    Budget,
    ClassRow,
    DecisionDetail,
    DecisionRow,
    MirrorRow,
    PlaceRow,
    PrefixRow,
    ScoreRow,
    Snapshot,
    SplitRow,
    TargetMeasure,
    TenantRow,
)
from router.operate.dashboard.why import why
from router.operate.dashboard.window import WINDOW_S, Sketch
from router.operate.operations import Operations
from router.shared.prefixes.prefix import Prefix
from router.shared.store.base import StoreFailed
from shards.kv.keys import BLOCK_TOKENS

_UNIT = 1000
"""Costs are counted in thousandths."""

_MOST_CANDIDATES = 16
_MOST_PREFIXES = 50
_MOST_TROUBLE = 300


async def snapshot(operations: Operations, since: int = 0) -> Snapshot:
    """The router's state now, with the decisions that changed after revision `since`."""
    gateway, board = operations.gateway, operations.board
    gateway.later.flush()
    now, unix, config = gateway.clock(), gateway.unix_time(), gateway.config
    tenants = await asyncio.gather(*(_tenant_row(tenant, operations, now) for tenant in config.tenants.values()))
    if since > board.revision:
        # the client's revision is from before this router's restart
        since = 0
    waiting, _ = gateway.dispatcher.waiting()
    prefixes = gateway.prefixes.of()
    return Snapshot(
        at=unix,
        up_s=now - board.started_at,
        window_s=min(WINDOW_S, now - board.started_at),
        config_version=config.version,
        shadow_version=None if gateway.decider.shadow is None else gateway.decider.shadow.version,
        is_ready=gateway.is_ready(),
        worst_lag_s=operations.telemetry.worst_lag_s,
        in_flight=gateway.cluster.in_flight,
        waiting=sum(waiting.values()),
        requests=sum(sum(row.outcomes.values()) for row in tenants),
        models=tuple(gateway.cluster.models()),
        indexed_blocks=len(gateway.beliefs.index),
        classes=tuple(_class_row(service_class, operations, now) for service_class in config.classes.values()),
        tenants=tuple(_with_shares(list(tenants))),
        backends=tuple(_backend_rows(operations, now)),
        revision=board.revision,
        decisions=tuple(_decision_row(row, unix - now) for row in board.rows(since)),
        prefixes=tuple(_prefix_row(prefix, unix) for prefix in nsmallest(_MOST_PREFIXES, prefixes, key=_urgency)),
        all_prefixes=len(prefixes),
        splits=tuple(map(_split_row, gateway.splits.standings())),
        mirrors=tuple(map(mirror_row, gateway.mirrors.compared())),
        batches=tuple(islice(batch_rows(operations.batches, unix), MOST_SHOWN)),
    )


def detail(number: int, operations: Operations) -> DecisionDetail | None:
    """All of the decision with this number; None if it is no longer kept or was none."""
    gateway, row = operations.gateway, operations.board.row(number)
    if row is None:
        return None
    decision, asked = row.decision, row.asked
    best = sorted(decision.scores, key=lambda score: -score[1])[:_MOST_CANDIDATES] if decision else ()
    scores: dict[str, dict[str, float | None]] = {name: {} for name, _ in best}
    for name, score, value in decision.details if decision else ():
        if name in scores:
            scores[name][score] = value
    return DecisionDetail(
        row=_decision_row(row, gateway.unix_time() - gateway.clock()),
        policy=decision.policy if decision else "",
        candidates=tuple(ScoreRow(name, total, scores[name]) for name, total in best),
        dropped=dict(decision.dropped) if decision else {},
        objections=worded(objection for _, objection in decision.dropped) if decision else {},
        blocks=len(asked.block_keys) if asked and _was_tokenized(asked) else None,
        block_tokens=_block_tokens(asked) if asked else BLOCK_TOKENS,
        held=_held(asked, gateway) if asked else {},
    )


def _held(asked: Request, gateway: Gateway) -> dict[str, int]:
    prompt = PromptKeys(asked.block_keys, asked.model, is_exact=asked.least_prompt_tokens is None)
    return {name: match.blocks for name, match in gateway.beliefs.longest(prompt).items()}


def _block_tokens(asked: Request) -> int:
    """Tokens for each of its blocks; for text an average, from its estimated length."""
    if asked.least_prompt_tokens is None or not asked.block_keys:
        return BLOCK_TOKENS
    return max(1, asked.prompt_tokens // len(asked.block_keys))


def _was_tokenized(asked: Request) -> bool:
    # a prompt shorter than a block has no keys, so no backend can hold a block of it
    return bool(asked.block_keys) or asked.prompt_tokens < BLOCK_TOKENS


def _class_row(service_class: ServiceClass, operations: Operations, now: float) -> ClassRow:
    minute = operations.board.of_class(service_class.name, now)
    _, waiting = operations.gateway.dispatcher.waiting()
    return ClassRow(
        name=service_class.name,
        rank=service_class.rank,
        ttft=_measure(minute.ttft, service_class.ttft_s, service_class.ttft_quantile),
        tpot=_measure(minute.tpot, service_class.tpot_s, service_class.tpot_quantile),
        deadline_s=service_class.deadline_s,
        waiting=waiting.get(service_class.name, 0),
        outcomes=minute.outcomes,
        steps=minute.steps,
    )


def _measure(seen: Sketch, target_s: float | None, quantile: float) -> TargetMeasure:
    return TargetMeasure(
        count=len(seen),
        p50_s=seen.quantile(0.5),
        p95_s=seen.quantile(0.95),
        p99_s=seen.quantile(0.99),
        quantile=quantile,
        target_s=target_s,
        at_quantile_s=seen.quantile(quantile),
        late=0 if target_s is None else seen.count_above(target_s),
    )


async def _tenant_row(tenant: Tenant, operations: Operations, now: float) -> TenantRow:
    """The row of `tenant` without its share, which depends on the other tenants."""
    gateway, board = operations.gateway, operations.board
    minute, whole = board.of_tenant(tenant.name, now), Totals()
    for (name, _), totals in board.totals.items():
        if name == tenant.name:
            whole.add(totals)
    waiting, _ = gateway.dispatcher.waiting()
    return TenantRow(
        name=tenant.name,
        weight=tenant.weight,
        share=0.0,
        entitled=None,
        running=gateway.admission.running(tenant.name),
        waiting=waiting.get(tenant.name, 0),
        outcomes=minute.outcomes,
        prompt_tokens=minute.prompt_tokens,
        reported_tokens=minute.reported_tokens,
        cached_tokens=minute.cached_tokens,
        hit_share=minute.hit_share,
        completion_tokens=minute.completion_tokens,
        cost_minute=minute.cost / _UNIT,
        cost=whole.cost / _UNIT,
        budgets=await _budgets(tenant, gateway),
        currency=gateway.config.prices.currency,
    )


async def _budgets(tenant: Tenant, gateway: Gateway) -> dict[str, Budget]:
    """What is left of the tenant's own limits; empty without limits or while the store cannot be read."""
    whole = descriptors(tenant, "")[:1]
    if not meters(whole):
        return {}
    try:
        standing = await gateway.admission.store.standing(whole)
    except StoreFailed:
        return {}
    allowances = {"requests": standing.requests, "tokens": standing.tokens, "cost": standing.cost}
    currency = tenant.limits.currency
    return {
        name: Budget(allowance.limit, allowance.remaining, _left(name, allowance.remaining, currency))
        for name, allowance in allowances.items()
        if allowance is not None
    }


def _left(name: str, remaining: int, currency: str | None) -> str:
    """What is left of a limit, as people read it."""
    if name == "cost" and currency is not None:
        return rounded_cost(remaining * COST_UNIT, currency)
    return f"{remaining:,} {name}"


def _with_shares(rows: list[TenantRow]) -> Iterator[TenantRow]:
    used = sum(row.cost_minute for row in rows)
    active = {row.name for row in rows if row.cost_minute or row.waiting or row.running}
    weights = sum(row.weight for row in rows if row.name in active)
    for row in rows:
        share = row.cost_minute / used if used else 0.0
        yield replace(row, share=share, entitled=row.weight / weights if row.name in active else None)


def _backend_rows(operations: Operations, now: float) -> Iterator[BackendRow]:
    """All backends, the ranks of a server next to each other."""
    gateway = operations.gateway
    views = {view.name: view for view in gateway.cluster.view(now).backends}
    for name in views:
        ranks = gateway.cluster.server_of(name).ranks
        if name == ranks[0]:
            yield from (_backend_row(views[rank], operations, now) for rank in ranks)


def _backend_row(view: BackendView, operations: Operations, now: float) -> BackendRow:
    gateway, minute = operations.gateway, operations.board.of_backend(view.name, now)
    load = gateway.cluster.backend(view.name).load()
    ranks, trouble = gateway.cluster.server_of(view.name).ranks, gateway.cluster.trouble(view.name)
    return BackendRow(
        name=view.name,
        server=ranks[0],
        rank=ranks.index(view.name),
        ranks=len(ranks),
        pool=view.pool,
        kind=view.kind,
        models=tuple(sorted(view.models)),
        state=_state(view, trouble),
        draining=view.draining,
        weight=view.weight,
        in_flight=gateway.cluster.flights(view.name),
        running=view.running,
        waiting=view.waiting,
        most=view.max_requests or view.adaptive_limit,
        free_tokens=view.free_tokens,
        total_tokens=load.total_tokens,
        prompt_tokens=minute.prompt_tokens,
        hit_share=minute.hit_share,
        queue_s=view.queue_s,
        prefill_per_s=1 / view.latency.token_s if view.latency.token_s > 0 else 0.0,
        outcomes=minute.outcomes,
        reported_s_ago=view.reported_s_ago,
        events=_events(view.name, gateway),
        trouble=trouble.reason[:_MOST_TROUBLE] if trouble else "",
        trouble_s=trouble.since_s if trouble else None,
    )


_USED = {Trust.PROVEN: "cache events used", Trust.UNPROVEN: "cache events on trial"}


def _events(backend: str, gateway: Gateway) -> str:
    """How cache events of `backend` are used, for each of its models if that differs."""
    beliefs = gateway.beliefs
    reports = beliefs.parity.reports_of(backend)
    if not beliefs.hears(backend):
        return "; ".join(report.reason for report in reports if report.reason)
    words = {_of_model(report, len(reports)) for report in reports} or {_USED[Trust.UNPROVEN]}
    return "; ".join(sorted(words))


def _of_model(report: ParityReport, models: int) -> str:
    used = _USED.get(report.trust, "cache events not used")
    about = f" for {report.model}" if models > 1 and report.reason else ""
    return f"{used}{about}{f': {report.reason}' if report.reason else ''}"


def _state(view: BackendView, trouble: Trouble | None) -> str:
    if not view.healthy:
        return "unreached" if trouble and not trouble.was_well else "ill"
    return "draining" if view.draining else "well"


def _urgency(prefix: Prefix) -> tuple[bool, float]:
    """Sort key: prefixes with a problem first, then the newest."""
    return (prefix.state == "ready" and not prefix.trouble, -prefix.created_at)


def mirror_row(compared: Compared) -> MirrorRow:
    """`compared` with means in place of sums."""

    def mean(whole: float) -> float | None:
        return whole / compared.pairs if compared.pairs else None

    own, mirror = compared.own, compared.mirror
    return MirrorRow(
        rule=compared.rule,
        pool=compared.pool,
        share=compared.share,
        pairs=compared.pairs,
        failed=mirror.failed,
        own_failed=own.failed,
        left_out=compared.left_out,
        ttft_s=mean(mirror.ttft_s),
        own_ttft_s=mean(own.ttft_s),
        seconds=mean(mirror.seconds),
        own_seconds=mean(own.seconds),
        tokens=mean(mirror.tokens),
        own_tokens=mean(own.tokens),
    )


def _split_row(standing: Standing) -> SplitRow:
    tally = standing.tally
    counts = (tally.ended, tally.failed, tally.missed)
    return SplitRow(standing.rule, standing.pool, standing.share, *counts, standing.lost or "")


def _prefix_row(prefix: Prefix, unix: float) -> PrefixRow:
    return PrefixRow(
        id=prefix.id,
        tenant=prefix.tenant,
        model=prefix.model,
        state=prefix.state,
        message=prefix.trouble,
        tokens=prefix.tokens,
        shards=prefix.shards,
        left_s=max(0.0, prefix.expires_at - unix),
        places=tuple(
            PlaceRow(place.backend, place.held_tokens, place.pinned_tokens, place.can_pin)
            for place in sorted(prefix.places, key=lambda place: place.backend)
        ),
    )


def _decision_row(row: Row, unix_offset: float) -> DecisionRow:
    decision, asked = row.decision, row.asked
    return DecisionRow(
        number=row.number,
        request=row.request,
        at=row.at + unix_offset,
        tenant=row.tenant,
        service_class=row.service_class,
        model=asked.model if asked else "",
        prompt_tokens=asked.prompt_tokens if asked else row.usage.prompt_tokens,
        chosen=decision.chosen if decision else None,
        why=why(decision) if decision else f"ended before a decision: {row.code}",
        outcome=row.outcome,
        code=row.code,
        predicted_ttft_s=decision.predicted_ttft_s if decision else None,
        ttft_s=row.ttft_s,
        seconds=None if row.ended_at is None else row.ended_at - row.at,
        cached_tokens=row.usage.cached_tokens if row.is_reported else None,
        completion_tokens=row.usage.completion_tokens,
        likely_prompt_tokens=asked.likely_prompt_tokens if asked else None,
    )
