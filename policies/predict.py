"""The one prediction of a request's time at a backend, shared by scores, admission, Retry-After and on_miss."""

from __future__ import annotations

from policies.nouns import BackendView, Capability, Request

_POOLED = frozenset({Capability.EMBEDDINGS, Capability.RERANK})


def uncached_tokens(request: Request, backend: BackendView) -> int:
    """Prompt tokens that `backend` would compute, at least one; all of them if its cached part is unknown."""
    return max(1, request.prompt_tokens - (backend.held_tokens or 0))


def may_fit(request: Request, backend: BackendView) -> bool:
    """Can prompt and answer together fit the context of `backend`? True if it does not report its context.

    A prompt with an estimated length counts with its lower bound: only the backend knows whether it fits. A request
    of many texts (embeddings) passes: each of them must fit, but they are measured together.
    """
    return _fits(request.surely_tokens, request, backend)


def will_fit(request: Request, backend: BackendView) -> bool:
    """Do prompt and answer fit it even at the upper end of the prompt's estimate?"""
    likely = request.likely_prompt_tokens
    return _fits(request.prompt_tokens if likely is None else likely[1], request, backend)


def _fits(prompt_tokens: int, request: Request, backend: BackendView) -> bool:
    limit = backend.context_tokens
    return limit is None or not _POOLED.isdisjoint(request.needs) or prompt_tokens + request.max_new_tokens <= limit


def predicted_ttft_s(request: Request, backend: BackendView) -> float:
    """Seconds from sending `request` to `backend` now to its first token: its queue, then the uncached prefill."""
    uncached = uncached_tokens(request, backend)
    return backend.latency.ttft_s(uncached, request.prompt_tokens - uncached, queue_s=backend.queue_s)
