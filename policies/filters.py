"""Filters: may this backend take this request? Each is built from its options and is a pure function of one view."""

from __future__ import annotations

from policies.compose import Filter
from policies.nouns import BackendView, Request
from policies.predict import may_fit, uncached_tokens


def healthy(*, fresh: float = 10.0) -> Filter:
    """Is the backend well and not draining, with a newest report, if it sends any, at most `fresh` seconds old?"""

    def passes(_: Request, backend: BackendView) -> bool:
        stale = backend.reported_s_ago is not None and backend.reported_s_ago > fresh
        return backend.healthy and not backend.draining and not stale

    return passes


def serves_model() -> Filter:
    """Does it serve the model that the request names?"""
    return lambda request, backend: request.model in backend.models


def fits_context() -> Filter:
    """Do prompt and answer together fit its context? A backend that does not report its context passes."""
    return may_fit


def has_room(*, tokens: int = 0) -> Filter:
    """Does its KV pool have room for the part of the prompt that it does not hold, and for `tokens` more?

    KV that it would preempt for the request counts as room. A backend with unknown room passes, and so does an idle
    one: it never gets more room than it has.
    """

    def passes(request: Request, backend: BackendView) -> bool:
        if backend.free_tokens is None or backend.running + backend.waiting == 0:
            return True
        return uncached_tokens(request, backend) + tokens <= backend.free_tokens + backend.reclaimable_tokens

    return passes


def under_limit() -> Filter:
    """Does it run and queue fewer requests than it runs at once, without those that it would preempt?

    If it does not report that number, the limit is adaptive; without either it passes.
    """

    def passes(_: Request, backend: BackendView) -> bool:
        limit = backend.adaptive_limit if backend.max_requests is None else backend.max_requests
        return limit is None or backend.running + backend.waiting - backend.reclaimable_requests < limit

    return passes
