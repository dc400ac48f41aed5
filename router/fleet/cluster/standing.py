"""The part of a backend's view that is the same for every request, until something of the backend changes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from backends.base import Backend, Description, Load
from policies.learning.cost import Work
from policies.nouns import BackendView
from router.fleet.cluster.flights import Flights, Traffic

_NOTHING = Description(models=frozenset())
"""The description of a backend that was never reached."""


class Inputs(NamedTuple):
    """All that a Standing is made from, beside the backend's report, name, pool and kind.

    `flights` is the revision of this router's flights there; `limit` is the adaptive limit.
    """

    description: Description | None
    flights: int
    elsewhere: Traffic
    limit: int
    may_serve: bool
    is_kept_out: bool


class Role(NamedTuple):
    """What a pool is for: its backends can fetch KV from those of the pool `prefill`, or it `only_prefills` itself."""

    prefill: str | None = None
    only_prefills: bool = False


BOTH = Role()
"""Prompts and answers."""

ONLY_PREFILLS = "only_prefills"
"""Why such a backend gets no request of its own."""


class Standing(msgspec.Struct, frozen=True):
    """What is known of a backend whatever the request is. `view` lacks what depends on the request or on time.

    `unseen` requests were sent after the newest report, and `gone` requests of this router that it counts have ended
    since. `theirs` is the prefill that waits there and that this router did not send. `load` is the newest report;
    `reported_tokens` of prefill wait there, reported or sent since, None where the backend does not report them.
    `held_tokens` in the view are those of a prompt that nothing is believed of: none where the backend reports its
    cache, else unknown.
    """

    inputs: Inputs
    load: Load
    description: Description
    view: BackendView
    unseen: int
    gone: int
    reported_tokens: int | None
    theirs: Work


def standing_of(backend: Backend, flights: Flights, load: Load, inputs: Inputs, role: Role = BOTH) -> Standing:
    """The Standing of `backend` in its `role` with the report `load` and `flights` of this router; `inputs` has their
    revision."""
    description, _, others, limit, may_serve, is_kept_out = inputs
    known = description or _NOTHING
    if load.reported_at is None:
        unseen, unseen_tokens, gone = len(flights.open), flights.waiting_tokens, 0
    else:
        unseen, unseen_tokens = flights.unseen(load.reported_at)
        gone = flights.gone(load.reported_at)
    if load.running is None:
        running, late = len(flights.open) - flights.waiting + others.running, 0
    else:
        running, late = max(0, load.running - gone), max(0, gone - load.running)
    waiting = flights.waiting + others.waiting if load.waiting is None else max(0, load.waiting - late) + unseen
    waiting_tokens = others.waiting_tokens if load.waiting_tokens is None else load.waiting_tokens
    reported_tokens = None if load.waiting_tokens is None else load.waiting_tokens + unseen_tokens
    if reported_tokens is None:
        theirs = Work(others.waiting_tokens, others.waiting_pairs)
    else:
        theirs = Work(max(0, reported_tokens - flights.waiting_tokens), 0.0)
    view = BackendView(
        name=backend.name,
        pool=backend.pool,
        kind=backend.kind,
        models=known.models,
        healthy=may_serve and description is not None,
        draining=is_kept_out or load.draining,
        running=running,
        waiting=waiting,
        waiting_tokens=waiting_tokens + unseen_tokens,
        max_requests=load.max_requests,
        free_tokens=None if load.free_tokens is None else max(0, load.free_tokens - unseen_tokens),
        context_tokens=known.context_tokens,
        held_tokens=0 if known.reports_cache else None,
        capabilities=known.capabilities,
        # flights of other routers must not keep this one from its first there: it would never learn the limit
        adaptive_limit=None if load.max_requests is not None else max(limit, running + waiting - len(flights.open) + 1),
        unfit=ONLY_PREFILLS if role.only_prefills else None,
        cache_tokens=load.total_tokens,
        prefill=role.prefill,
        needs_prefill=known.needs_prefill,
        mean_weight=flights.mean_weight,
    )
    return Standing(inputs, load, known, view, unseen, gone, reported_tokens, theirs)
