"""Marginal cost: the seconds that a placement costs, to its own request and to the others at that backend. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.compose import Score
from policies.nouns import BackendView, Request

NAME = "marginal_cost"
"""The score's name in the SLA file."""

FIRST = 3.0
"""A second before the first token, of this request or of a later one after an eviction, counts as much as three
seconds of decoding: the client sees nothing meanwhile."""

_USUAL_CHURN = 0.36
"""`fresh_tokens` of a backend in relation to its cache, if all caches are computed anew at the same rate."""

_LEAST_S = 1e-3
"""Costs are told apart to about this."""


class CostParts(NamedTuple):
    """The parts of one placement's cost in seconds, each multiplied by its weight.

    Of this request: `queue`, waiting for prompts in front of it and for a place, `prefill` and `decode`. Of the others
    there: `slowdown` of the requests that run, during its prefill or while it decodes beside them, and `delay` of the
    requests that wait. Of later requests: `eviction`, to compute again what its prompt evicts, as far as it will be
    asked for.
    """

    queue: float
    prefill: float
    decode: float
    slowdown: float
    delay: float
    eviction: float


def marginal_cost() -> Score:
    """The least marginal cost among the candidates divided by a candidate's own, in seconds: the cheapest has 1."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        costs = [sum(cost_parts(request, backend)) for backend in candidates]
        least = min(costs, default=0.0) + _LEAST_S
        return [least / (cost + _LEAST_S) for cost in costs]

    return score


def cost_parts(request: Request, backend: BackendView) -> CostParts:
    """The cost of placing `request` at `backend`, in weighted seconds.

    A part counts as much as its class weighs, and up to twice as much the nearer its target is: TTFT for `queue` and
    `prefill`, TPOT for `decode`. The other requests there count with the mean weight of their classes. All that a
    backend does not report counts as none: without a cache size nothing is evicted, and without `held_tokens` the whole
    prompt is computed. `delay` counts once although first tokens wait: those requests were there before, and only some
    of them are delayed. Times come from its latency model, so a backend with nothing but response times has them too.
    """
    latency, promised, prompt_tokens = backend.latency, request.promised, request.prompt_tokens
    uncached = max(1, prompt_tokens - (backend.held_tokens or 0))
    new_tokens = request.expected_new_tokens or request.max_new_tokens
    there = backend.running + backend.waiting
    work_s = uncached * (latency.token_s + latency.pair_s * (prompt_tokens - uncached / 2))
    context = prompt_tokens + new_tokens / 2
    added_s = latency.sequence_s + latency.context_s * context
    contexts = backend.decoding_tokens + backend.waiting * prompt_tokens
    step_s = latency.step_s + latency.sequence_s * there + latency.context_s * contexts + added_s
    queue_s, prefill_s, decode_s = backend.queue_s, latency.fixed_s + work_s, new_tokens * step_s
    limit = backend.adaptive_limit if backend.max_requests is None else backend.max_requests
    if limit is not None and there >= limit:
        # places become free one after the other, each as often as a request is done
        queue_s += (there + 1 - limit) * (prefill_s + decode_s) / max(1, limit)
    first, rest = FIRST, 1.0
    if promised is not None:
        first, rest = FIRST * promised.weight, promised.weight
        if promised.ttft_s is not None:
            first *= 1.0 + min(1.0, (queue_s + prefill_s) / promised.ttft_s)
        elif promised.deadline_s is not None:
            first = rest = rest * (1.0 + min(1.0, (queue_s + prefill_s + decode_s) / promised.deadline_s))
        if promised.tpot_s is not None:
            rest *= 1.0 + min(1.0, step_s / promised.tpot_s)
    # the learnt time of a further sequence includes the prefills that come with it: only the larger of the two counts
    slower_s = max(work_s, request.sampling.choices * new_tokens * added_s)
    others = backend.mean_weight
    eviction_s = 0.0
    if backend.cache_tokens:
        eviction_s = work_s * min(1.0, backend.fresh_tokens / backend.cache_tokens / _USUAL_CHURN)
    return CostParts(
        first * queue_s,
        first * prefill_s,
        rest * decode_s,
        others * backend.running * slower_s,
        others * backend.waiting * work_s,
        FIRST * eviction_s,
    )
