"""How another SLA file would decide the router's latest requests."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec

from policies.errors import ExpectedError
from policies.nouns import ClusterView, Request
from policies.rules import Facts, classify
from policies.shadow import differences
from policies.sla.config import Config
from router.operate.config_desk import Differing, Resampled
from router.operate.dashboard.board import Row
from router.operate.what_if import backends_on_paper

MOST_SHOWN = 20
"""Kinds of differences that are listed, the most frequent first."""


def resampled(rows: Iterable[Row], running: Config, other: Config, view: ClusterView) -> Resampled:
    """How `other` decides the requests of `rows` differently than `running` does now, on `view`.

    Backends of pools that only `other` has are assumed to be well, idle and empty.
    """
    newest = {row.request: row for row in rows if row.asked is not None}
    compared = unknown = differ = 0
    found: dict[tuple[str, str, str], Differing] = {}
    views: dict[str, ClusterView] = {}
    for row in newest.values():
        asked = row.asked
        assert asked is not None, "only decided requests are looked at"
        facts = _facts_of(asked, row, running)
        if facts is None:
            unknown += 1
            continue
        ruling = classify(facts, running)
        if asked.model not in views:
            views[asked.model] = _with_new_pools(view, asked.model, other)
        decision = running.policies[ruling.policy].decide(asked, view, random.Random(0))
        found_here = differences(asked, facts, ruling, decision, view=views[asked.model], shadow=other)
        compared += 1
        differ += bool(found_here)
        for each in found_here:
            key = (each.what, each.decided, each.shadow)
            before = found.get(key)
            count = 1 if before is None else before.count + 1
            found[key] = Differing(*key, count, row.request)
    most = sorted(found.values(), key=lambda each: -each.count)[:MOST_SHOWN]
    return Resampled(compared, differ, unknown, tuple(most))


def _facts_of(asked: Request, row: Row, running: Config) -> Facts | None:
    """What rules test of this request; None if `running` does not rule by it as it did: headers are not kept."""
    tenant = running.tenants.get(asked.tenant) or running.anonymous
    if tenant is None or tenant.name != asked.tenant or asked.policy not in running.policies:
        return None
    facts = Facts(
        tenant,
        asked.model,
        prompt_tokens=asked.prompt_tokens,
        max_new_tokens=asked.max_new_tokens,
        uncached_tokens=max(1, asked.prompt_tokens - row.usage.cached_tokens),
        priority=asked.priority,
        stream=asked.stream,
    )
    try:
        ruling = classify(facts, running)
    except ExpectedError:
        return None
    return facts if (ruling.service_class.name, ruling.policy) == (asked.service_class, asked.policy) else None


def _with_new_pools(view: ClusterView, model: str, other: Config) -> ClusterView:
    """The backends of `view` in pools that `other` has, and those that it has on paper in others."""
    there = {backend.pool for backend in view.backends}
    kept = [backend for backend in view.backends if backend.pool in other.pools]
    new = [backend for backend in backends_on_paper(model, other) if backend.pool not in there]
    return msgspec.structs.replace(view, backends=(*kept, *new))
