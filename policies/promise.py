"""The due time of a first token by its service class, and whether it can still be met. Pure."""

from __future__ import annotations

from policies.nouns import BackendView, ClusterView, Decision, Request, ServiceClass
from policies.predict import uncached_tokens
from policies.waiting import would_take


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
    drawn = new_tokens * request.sampling.choices
    costs = [answer_s(request, backend, new_tokens=drawn) for backend in would_take(view, decision)]
    return min(costs, default=0.0)


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
