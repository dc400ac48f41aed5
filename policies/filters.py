"""Filters: may this backend take this request? Each is made from its options; pure questions on one view."""

from __future__ import annotations

from policies.compose import Filter
from policies.nouns import BackendView, Request
from policies.predict import may_fit, uncached_tokens


def healthy(*, fresh: float = 10.0) -> Filter:
    """Well, not draining, and its newest report, if it gives any, is at most `fresh` seconds old."""

    def passes(_: Request, backend: BackendView) -> bool:
        stale = backend.reported_s_ago is not None and backend.reported_s_ago > fresh
        return backend.healthy and not backend.draining and not stale

    return passes


def serves_model() -> Filter:
    """It serves the model that the request names."""
    return lambda request, backend: request.model in backend.models


def fits_context() -> Filter:
    """Prompt and answer together may fit its context; one that does not tell its context passes."""
    return may_fit


def has_room(*, tokens: int = 0) -> Filter:
    """Its KV pool has room for the part of the prompt that it does not hold, and `tokens` more.

    What it would preempt for the request counts as room. Passes where the room is unknown, and where nothing runs or
    waits: an idle backend never gets more room than it has.
    """

    def passes(request: Request, backend: BackendView) -> bool:
        if backend.free_tokens is None or backend.running + backend.waiting == 0:
            return True
        return uncached_tokens(request, backend) + tokens <= backend.free_tokens + backend.reclaimable_tokens

    return passes


def under_limit() -> Filter:
    """It runs and queues fewer requests than it runs at once, without those that it would preempt.

    Where it does not tell how many that are, the limit is adaptive; with neither it passes.
    """

    def passes(_: Request, backend: BackendView) -> bool:
        limit = backend.adaptive_limit if backend.max_requests is None else backend.max_requests
        return limit is None or backend.running + backend.waiting - backend.reclaimable_requests < limit

    return passes
