"""Filters: may this backend take this request? Each is built from its options and is a pure function of views."""

from __future__ import annotations

from collections.abc import Sequence

from policies.compose import AtOnce, Filter
from policies.nouns import BackendView, Request
from policies.predict import may_fit


def healthy(*, fresh: float = 10.0) -> Filter:
    """Is the backend well and not draining, with a newest report, if it sends any, at most `fresh` seconds old?"""

    def failing(_: Request, backends: Sequence[BackendView]) -> list[BackendView]:
        found = []
        for backend in backends:
            age_s = backend.reported_s_ago
            if not backend.healthy or backend.draining or (age_s is not None and age_s > fresh):
                found.append(backend)
        return found

    return AtOnce(failing)


def serves_model() -> Filter:
    """Does it serve the model that the request names?"""

    def failing(request: Request, backends: Sequence[BackendView]) -> list[BackendView]:
        found, model, allowed = [], request.model, None
        for backend in backends:
            # those of one pool mostly share the set
            models = backend.models
            if models is not allowed:
                if model in models:
                    allowed = models
                else:
                    found.append(backend)
        return found

    return AtOnce(failing)


def fits_context() -> Filter:
    """Do prompt and answer together fit its context? A backend that does not report its context passes."""

    def failing(request: Request, backends: Sequence[BackendView]) -> list[BackendView]:
        found: list[BackendView] = []
        enough: int | None = None
        for backend in backends:
            context = backend.context_tokens
            if context is not None and (enough is None or context < enough):
                if may_fit(request, backend):
                    enough = context
                else:
                    found.append(backend)
        return found

    return AtOnce(failing)


def has_room(*, tokens: int = 0) -> Filter:
    """Does its KV pool have room for the part of the prompt that it does not hold, and for `tokens` more?

    KV that it would preempt for the request counts as room. A backend with unknown room passes, and so does an idle
    one: it never gets more room than it has.
    """

    def failing(request: Request, backends: Sequence[BackendView]) -> list[BackendView]:
        found, prompt_tokens = [], request.prompt_tokens
        for backend in backends:
            free_tokens = backend.free_tokens
            if free_tokens is not None and backend.running + backend.waiting:
                uncached = max(1, prompt_tokens - (backend.held_tokens or 0))
                if uncached + tokens > free_tokens + backend.reclaimable_tokens:
                    found.append(backend)
        return found

    return AtOnce(failing)


def under_limit() -> Filter:
    """Does it run and queue fewer requests than it runs at once, without those that it would preempt?

    If it does not report that number, the limit is adaptive; without either it passes.
    """

    def failing(_: Request, backends: Sequence[BackendView]) -> list[BackendView]:
        found = []
        for backend in backends:
            limit = backend.adaptive_limit if backend.max_requests is None else backend.max_requests
            if limit is not None and backend.running + backend.waiting - backend.reclaimable_requests >= limit:
                found.append(backend)
        return found

    return AtOnce(failing)
