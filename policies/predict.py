"""Predictions in seconds for a request at a backend: its times, which scores, the fair queue, Retry-After and on_miss
share, and what its placement costs the request and others there (the score `marginal_cost`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from policies.nouns import BackendView, Capability, ClusterView, Decision, Fetch, Request, ServiceClass
from policies.waiting import would_take

POOLED = frozenset({Capability.EMBEDDINGS, Capability.RERANK})
"""Needs of requests with many texts, each of which must fit a context while they are measured together."""

MARGINAL_COST = "marginal_cost"
"""The score's name in the SLA file."""

FIRST = 3.0
"""A second before the first token, of this request or of a later one after an eviction, counts as much as three
seconds of decoding: the client sees nothing meanwhile."""

_USUAL_CHURN = 0.36
"""`fresh_tokens` of a backend in relation to its cache, if all caches are computed anew at the same rate."""

_NEAR, _NEAR_IDLE, _NEAR_S, _NEAR_TOKENS = 0.03, 0.25, 1e-3, 64
"""Costs within this share and these seconds of the least are equal, where as much of the prompt is held but for these
tokens: predictions are no more exact than that, and of idle backends they differ only by the pace that was measured. So
in a quiet hour alike backends share requests and new prefixes, and each is measured now and then."""

_LESS = 1.0 - 1e-6
"""The score of a backend that costs as little as the cheapest, but for rounding, and holds less of the prompt: so far
below 1 that it is not taken for equal."""

FETCH_WORTH = 0.1
"""KV is fetched if that saves more than this share of the seconds of computing it: predictions are no more exact than
that, and a transfer is one more thing that can fail."""


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
    return context_tokens is None or tokens <= context_tokens or not POOLED.isdisjoint(request.needs)


def will_fit(request: Request, backend: BackendView) -> bool:
    """Do prompt and answer fit it even at the upper end of the prompt's estimate?"""
    return will_fit_context(request, backend.context_tokens)


def will_fit_context(request: Request, context_tokens: int | None) -> bool:
    """The same for a backend with this context; None: it does not report its context."""
    likely = request.likely_prompt_tokens
    tokens = request.max_new_tokens + (request.prompt_tokens if likely is None else likely[1])
    return context_tokens is None or tokens <= context_tokens or not POOLED.isdisjoint(request.needs)


def predicted_ttft_s(request: Request, backend: BackendView) -> float:
    """Seconds from sending `request` to `backend` now to its first token: its queue, then the uncached prefill."""
    prompt_tokens, latency = request.prompt_tokens, backend.latency
    uncached = max(1, prompt_tokens - (backend.held_tokens or 0))
    # as `Latency.prefill_s`, without a call: every decision asks
    work_s = uncached * (latency.token_s + latency.pair_s * (prompt_tokens - uncached + uncached / 2))
    return backend.queue_s + (latency.fixed_s + work_s)


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


class Cost(NamedTuple):
    """The parts of one placement's cost in seconds, and their weights.

    Of this request: `queue`, waiting for prompts in front of it and for a place, `fetch`, waiting longer than that for
    KV from another backend, `prefill` and `decode`. Of the others there: `slowdown` of the requests that run, during
    its prefill or while it decodes beside them, and `delay` of the requests that wait. Of later requests: `eviction`,
    to compute again what its prompt evicts, as far as it will be asked for. A second before its own first token weighs
    `first`, a later one `rest`, and one of others `others`. `total` is the weighted sum, in seconds.
    """

    queue: float
    fetch: float
    prefill: float
    decode: float
    slowdown: float
    delay: float
    eviction: float
    first: float
    rest: float
    others: float
    total: float

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Name of a part -> its seconds and their weight."""
        weights = (self.first, self.first, self.first, self.rest, self.others, FIRST * self.others, FIRST)
        return {name: (self[at], weights[at]) for at, name in enumerate(self._fields[: len(weights)])}


def marginal_cost() -> Callable[[Request, Sequence[BackendView]], list[float | None]]:
    """The least marginal cost among the candidates divided by a candidate's own, in seconds: the cheapest have 1.

    Of those that cost the same, the ones that hold most of the prompt.
    """

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        if not candidates:
            return []
        costs, least, most_held, cheapest = [], math.inf, 0, candidates[0]
        for parts, backend in zip(_costs(request, candidates), candidates, strict=True):
            cost = (parts[-1] if backend.offer is None else least_cost(request, backend)[0].total) + _NEAR_S
            costs.append(cost)
            if cost * _LESS <= least:
                held_tokens = backend.held_tokens or 0
                # of equal ones the one that holds most of the prompt
                if cost < least * _LESS or held_tokens > most_held:
                    most_held, cheapest = held_tokens, backend
                if cost < least:
                    least = cost
        near, near_idle = (1.0 + _NEAR) * least, (1.0 + _NEAR_IDLE) * least
        enough_tokens, queue_s = most_held - _NEAR_TOKENS, cheapest.queue_s
        is_idle = not cheapest.running + cheapest.waiting
        values: list[float | None] = []
        for backend, cost in zip(candidates, costs, strict=True):
            is_near = cost <= near or (
                is_idle and cost <= near_idle and not backend.running + backend.waiting and backend.queue_s <= queue_s
            )
            share = least / cost
            if is_near and (backend.held_tokens or 0) >= enough_tokens:
                share = 1.0
            elif share > _LESS:
                share = _LESS
            values.append(share)
        return values

    return score


def least_cost(request: Request, backend: BackendView) -> tuple[Cost, Fetch | None]:
    """The cost of placing `request` at `backend`, which fetches its offer if that is worth it, and the fetch if so."""
    computed, offer = cost_of(request, backend), backend.offer
    if offer is None:
        return computed, None
    fetched = cost_of(request, backend, offer)
    saved = computed.total - fetched.total
    if saved <= FETCH_WORTH * computed.first * offer.computing_s:
        return computed, None
    return fetched, replace(offer, saved=saved)


def cost_of(request: Request, backend: BackendView, fetch: Fetch | None = None) -> Cost:
    """The cost of placing `request` at `backend`, which computes the prompt but for what it holds and does `fetch`.

    KV arrives while the request waits in the backend's queue and stalls no other request. It evicts as much as computed
    KV, which will stall the `crowd` of a usual backend when it is computed again. A part weighs as much as its class,
    and up to twice as much the nearer its target is: TTFT for `queue`, `fetch` and `prefill`, TPOT for `decode`. The
    other requests there count with the mean weight of their classes. All that a backend does not report counts as none:
    without a cache size nothing is evicted, and without `held_tokens` the whole prompt is computed. Times come from its
    latency model, so a backend with nothing but response times has them too.
    """
    return Cost(*_costs(request, (backend,), fetch)[0])


def _costs(
    request: Request, backends: Sequence[BackendView], fetch: Fetch | None = None
) -> list[tuple[float, float, float, float, float, float, float, float, float, float, float]]:
    """For each of `backends` the fields of its Cost, as `cost_of` says: a decision has many, and reads the totals."""
    prompt_tokens, promised, choices = request.prompt_tokens, request.promised, request.sampling.choices
    new_tokens = request.expected_new_tokens or request.max_new_tokens
    context = prompt_tokens + new_tokens / 2
    weight, ttft_s, deadline_s, tpot_s = 1.0, None, None, None
    if promised is not None:
        weight, ttft_s, tpot_s = promised.weight, promised.ttft_s, promised.tpot_s
        deadline_s = promised.deadline_s if ttft_s is None else None
    costs = []
    for backend in backends:
        latency, waiting, running = backend.latency, backend.waiting, backend.running
        prefill, decode = backend.doubt
        held_tokens = backend.held_tokens or 0
        if fetch is not None:
            held_tokens += fetch.tokens
        uncached = max(1, prompt_tokens - held_tokens)
        there = max(0, running + waiting - backend.yielding)
        work_s = prefill * uncached * (latency.token_s + latency.pair_s * (prompt_tokens - uncached / 2))
        added_s = decode * (latency.sequence_s + latency.context_s * context)
        contexts = backend.decoding_tokens + waiting * prompt_tokens
        step_s = decode * (latency.step_s + latency.sequence_s * there + latency.context_s * contexts) + added_s
        queue_s, prefill_s, decode_s = backend.queue_s, prefill * latency.fixed_s + work_s, new_tokens * step_s
        limit = backend.adaptive_limit if backend.max_requests is None else backend.max_requests
        room_tokens = None if backend.free_tokens is None else backend.free_tokens + backend.reclaimable_tokens
        if (limit is not None and running + waiting + backend.awaited >= limit) or (
            room_tokens is not None and prompt_tokens * (1 + backend.awaited) > room_tokens
        ):
            # there may be no place at once
            queue_s += place_s(request, backend, prefill_s + decode_s)
        fetch_s, evicting_s, others = 0.0, work_s, backend.mean_weight
        if fetch is not None:
            fetch_s = max(0.0, fetch.seconds - backend.queue_s)
            evicting_s = work_s + prefill * fetch.computing_s * (1.0 + others * fetch.crowd / FIRST)
        first, rest = FIRST * weight, weight
        if ttft_s is not None:
            first *= 1.0 + min(1.0, (queue_s + fetch_s + prefill_s) / ttft_s)
        elif deadline_s is not None:
            first = rest = rest * (1.0 + min(1.0, (queue_s + fetch_s + prefill_s + decode_s) / deadline_s))
        if tpot_s is not None:
            rest *= 1.0 + min(1.0, step_s / tpot_s)
        # the learnt time of a further sequence includes the prefills that come with it: only the larger of the two
        # counts
        slower_s = max(work_s, choices * new_tokens * added_s)
        eviction_s = 0.0
        if backend.cache_tokens:
            eviction_s = evicting_s * min(1.0, backend.fresh_tokens / backend.cache_tokens / _USUAL_CHURN)
        slowdown_s, delay_s = running * slower_s, waiting * work_s
        own = first * (queue_s + fetch_s + prefill_s) + rest * decode_s
        total = own + others * (slowdown_s + FIRST * delay_s) + FIRST * eviction_s
        costs.append(
            (queue_s, fetch_s, prefill_s, decode_s, slowdown_s, delay_s, eviction_s, first, rest, others, total)
        )
    return costs
