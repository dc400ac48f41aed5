"""Filters: may this backend take this request? Each is made from its options; pure questions on one view."""

from __future__ import annotations

from policies.compose import Filter
from policies.nouns import BackendView, Decision, Request

PASSING = frozenset({"has_room", "under_limit"})
"""Filters whose objection ends by itself when other requests finish."""


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
    """Prompt and answer together fit its context; one that does not tell its context passes."""

    def passes(request: Request, backend: BackendView) -> bool:
        limit = backend.context_tokens
        return limit is None or request.prompt_tokens + request.max_new_tokens <= limit

    return passes


def has_room(*, tokens: int = 0) -> Filter:
    """Its KV pool has room for the part of the prompt that it does not hold, and `tokens` more.

    Passes where the room is unknown, and where nothing runs or waits: an idle backend never gets more room than it has.
    """

    def passes(request: Request, backend: BackendView) -> bool:
        if backend.free_tokens is None or backend.running + backend.waiting == 0:
            return True
        return uncached_tokens(request, backend) + tokens <= backend.free_tokens

    return passes


def under_limit() -> Filter:
    """It runs and queues fewer requests than it runs at once; one that does not tell its limit passes."""
    return lambda _, backend: backend.max_requests is None or backend.running + backend.waiting < backend.max_requests


def uncached_tokens(request: Request, backend: BackendView) -> int:
    """Prompt tokens that `backend` would compute, at least one; where nobody knows what it holds, it holds nothing."""
    return max(1, request.prompt_tokens - (backend.held_tokens or 0))


def is_worth_waiting(decision: Decision) -> bool:
    """Was a backend dropped only for want of room, so that the same request may be placed a moment later?"""
    return decision.chosen is None and any(reason in PASSING for _, reason in decision.dropped)
