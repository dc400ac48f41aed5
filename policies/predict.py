"""The one prediction of a request's time at a backend, shared by scores, the fair queue, Retry-After and on_miss; and
when its first token is due by its service class."""

from __future__ import annotations

import math

from policies.nouns import BackendView, Capability, ClusterView, Decision, Request, ServiceClass
from policies.waiting import would_take

_POOLED = frozenset({Capability.EMBEDDINGS, Capability.RERANK})


def uncached_tokens(request: Request, backend: BackendView) -> int:
    """Prompt tokens that `backend` would compute, at least one; all of them if its cached part is unknown."""
    return max(1, request.prompt_tokens - (backend.held_tokens or 0))


def may_fit(request: Request, backend: BackendView) -> bool:
    """Whether prompt and answer can fit the context of `backend`; True if it does not report its context.

    A prompt with an estimated length counts with its lower bound: only the backend knows whether it fits. A request
    of many texts (embeddings) passes: each of them must fit, but they are measured together.
    """
    least, context_tokens = request.least_prompt_tokens, backend.context_tokens
    tokens = request.max_new_tokens + (request.prompt_tokens if least is None else least)
    return context_tokens is None or tokens <= context_tokens or not _POOLED.isdisjoint(request.needs)


def will_fit(request: Request, backend: BackendView) -> bool:
    """Do prompt and answer fit it even at the upper end of the prompt's estimate?"""
    return will_fit_context(request, backend.context_tokens)


def will_fit_context(request: Request, context_tokens: int | None) -> bool:
    """The same for a backend with this context; None: it does not report its context."""
    likely = request.likely_prompt_tokens
    tokens = request.max_new_tokens + (request.prompt_tokens if likely is None else likely[1])
    return context_tokens is None or tokens <= context_tokens or not _POOLED.isdisjoint(request.needs)


def predicted_ttft_s(request: Request, backend: BackendView) -> float:
    """Seconds from sending `request` to `backend` now to its first token: its queue, then the uncached prefill."""
    uncached = max(1, request.prompt_tokens - (backend.held_tokens or 0))
    return backend.queue_s + backend.latency.prefill_s(uncached, request.prompt_tokens - uncached)


def whole_s(request: Request, backend: BackendView) -> float:
    """Seconds from the begin of its prefill at `backend` to the end of the expected answer."""
    uncached, new_tokens = uncached_tokens(request, backend), request.expected_new_tokens or request.max_new_tokens
    prefill_s = backend.latency.prefill_s(uncached, request.prompt_tokens - uncached)
    context = request.prompt_tokens + new_tokens // 2
    return prefill_s + new_tokens * backend.latency.tpot_s(backend.running + 1, context)


def place_s(request: Request, backend: BackendView, whole_s: float) -> float:
    """Seconds until `backend` has a place for `request`, behind those that wait for a place there; 0 if it has one.

    Its requests are taken to last `whole_s` each and to end one after the other, and to free their part of the KV then.
    """
    there, awaited = backend.running + backend.waiting - backend.reclaimable_requests, backend.awaited
    limit = backend.adaptive_limit if backend.max_requests is None else backend.max_requests
    share = 0.0
    if limit is not None and there + awaited >= limit:
        share = (there + awaited + 1 - limit) / max(1, limit)
    if backend.free_tokens is not None and backend.cache_tokens and there > 0:
        needed = uncached_tokens(request, backend) * (1 + awaited)
        short = needed - backend.free_tokens - backend.reclaimable_tokens
        share = max(share, short / max(1, backend.cache_tokens - backend.free_tokens))
    return share * whole_s


def promised_ttft_s(service_class: ServiceClass, decode_s: float = 0.0) -> float | None:
    """Seconds from arrival within which the first token is due; None: no limit.

    A deadline is met if the first token leaves `decode_s` for the rest of the answer.
    """
    by_deadline = None if service_class.deadline_s is None else max(0.0, service_class.deadline_s - decode_s)
    if service_class.ttft_s is None or by_deadline is None:
        return service_class.ttft_s if by_deadline is None else by_deadline
    return min(service_class.ttft_s, by_deadline)


def fastest_prefill_s(request: Request, view: ClusterView, decision: Decision) -> float:
    """Seconds to the first token at the fastest backend that would take it, once it has room; 0 if there is none."""
    return min((_prefill_s(request, backend) for backend in would_take(view, decision)), default=0.0)


def fastest_decode_s(request: Request, view: ClusterView, decision: Decision, *, new_tokens: int) -> float:
    """Seconds from the first to the last of `new_tokens` at the fastest backend that would take it; 0 if none would."""
    context = request.prompt_tokens + new_tokens // 2
    steps = (backend.latency.tpot_s(backend.running + 1, context) for backend in would_take(view, decision))
    return new_tokens * min(steps, default=0.0)


def cost_s(request: Request, view: ClusterView, decision: Decision, *, new_tokens: int) -> float:
    """Backend seconds that `request` uses with answers of `new_tokens` each, at the backend where it uses least.

    The fair queue charges this; 0 if no backend would take it.
    """
    drawn, prompt_tokens, least_s = new_tokens * request.sampling.choices, request.prompt_tokens, math.inf
    for backend in would_take(view, decision) if decision.dropped else view.backends:
        latency = backend.latency
        fresh = max(1, prompt_tokens - (backend.held_tokens or 0))
        cached, batch = max(0, prompt_tokens - fresh), max(1, backend.running)
        # as `Latency.answer_s`, without a call for each backend
        context_tokens = cached + fresh + drawn / 2
        share_s = latency.step_s / batch + latency.sequence_s + latency.context_s * context_tokens
        prefill_s = latency.fixed_s + fresh * (latency.token_s + latency.pair_s * (cached + fresh / 2))
        answer_s = prefill_s + drawn * share_s
        if answer_s < least_s:
            least_s = answer_s
    return least_s if least_s < math.inf else 0.0


def answer_s(request: Request, backend: BackendView, *, new_tokens: int, uncached: int | None = None) -> float:
    """Seconds of `backend` that `request` uses with an answer of `new_tokens`.

    `uncached` tokens of its prompt were computed, if that is known already.
    """
    fresh = uncached_tokens(request, backend) if uncached is None else uncached
    cached = max(0, request.prompt_tokens - fresh)
    return backend.latency.answer_s(fresh, cached, new_tokens, batch=max(1, backend.running))


def _prefill_s(request: Request, backend: BackendView) -> float:
    fresh = uncached_tokens(request, backend)
    return backend.latency.prefill_s(fresh, max(0, request.prompt_tokens - fresh))
