"""Marginal cost: the seconds that a placement costs, to its own request and to the others at that backend. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from policies.compose import Score
from policies.nouns import BackendView, Fetch, Request
from policies.predict import place_s

NAME = "marginal_cost"
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


FETCH_WORTH = 0.1
"""KV is fetched if that saves more than this share of the seconds of computing it: predictions are no more exact than
that, and a transfer is one more thing that can fail."""


class Cost(NamedTuple):
    """The parts of one placement's cost in seconds, and their weights.

    Of this request: `queue`, waiting for prompts in front of it and for a place, `fetch`, waiting longer than that for
    KV from another backend, `prefill` and `decode`. Of the others there: `slowdown` of the requests that run, during
    its prefill or while it decodes beside them, and `delay` of the requests that wait. Of later requests: `eviction`,
    to compute again what its prompt evicts, as far as it will be asked for. A second before its own first token weighs
    `first`, a later one `rest`, and one of others `others`.
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

    @property
    def total(self) -> float:
        """The weighted sum, in seconds."""
        own = self.first * (self.queue + self.fetch + self.prefill) + self.rest * self.decode
        return own + self.others * (self.slowdown + FIRST * self.delay) + FIRST * self.eviction

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Name of a part -> its seconds and their weight."""
        weights = (self.first, self.first, self.first, self.rest, self.others, FIRST * self.others, FIRST)
        return {name: (self[at], weights[at]) for at, name in enumerate(self._fields[: len(weights)])}


def marginal_cost() -> Score:
    """The least marginal cost among the candidates divided by a candidate's own, in seconds: the cheapest have 1."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        costs = [
            (cost_of(request, backend) if backend.offer is None else least_cost(request, backend)[0]).total + _NEAR_S
            for backend in candidates
        ]
        least = min(costs, default=0.0)
        cheapest = candidates[costs.index(least)] if candidates else None
        return [
            1.0 if cheapest is not None and _is_near(cost, backend, least, cheapest) else least / cost
            for backend, cost in zip(candidates, costs, strict=True)
        ]

    return score


def _is_near(cost: float, backend: BackendView, least: float, cheapest: BackendView) -> bool:
    """Is the `cost` of `backend` as good as the `least`, that of `cheapest`?"""
    if cost > (1.0 + _NEAR_IDLE) * least or (backend.held_tokens or 0) < (cheapest.held_tokens or 0) - _NEAR_TOKENS:
        return False
    if cost <= (1.0 + _NEAR) * least:
        return True
    busy = backend.running + backend.waiting + cheapest.running + cheapest.waiting
    return not busy and backend.queue_s <= cheapest.queue_s


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
    latency, promised, prompt_tokens = backend.latency, request.promised, request.prompt_tokens
    prefill, decode = backend.doubt
    held_tokens = (backend.held_tokens or 0) + (0 if fetch is None else fetch.tokens)
    uncached = max(1, prompt_tokens - held_tokens)
    new_tokens = request.expected_new_tokens or request.max_new_tokens
    there = max(0, backend.running + backend.waiting - backend.yielding)
    work_s = prefill * uncached * (latency.token_s + latency.pair_s * (prompt_tokens - uncached / 2))
    context = prompt_tokens + new_tokens / 2
    added_s = decode * (latency.sequence_s + latency.context_s * context)
    contexts = backend.decoding_tokens + backend.waiting * prompt_tokens
    step_s = decode * (latency.step_s + latency.sequence_s * there + latency.context_s * contexts) + added_s
    queue_s, prefill_s, decode_s = backend.queue_s, prefill * latency.fixed_s + work_s, new_tokens * step_s
    queue_s += place_s(request, backend, prefill_s + decode_s)
    fetch_s, evicting_s = 0.0, work_s
    if fetch is not None:
        fetch_s = max(0.0, fetch.seconds - backend.queue_s)
        evicting_s = work_s + prefill * fetch.computing_s * (1.0 + backend.mean_weight * fetch.crowd / FIRST)
    first, rest = FIRST, 1.0
    if promised is not None:
        first, rest = FIRST * promised.weight, promised.weight
        if promised.ttft_s is not None:
            first *= 1.0 + min(1.0, (queue_s + fetch_s + prefill_s) / promised.ttft_s)
        elif promised.deadline_s is not None:
            first = rest = rest * (1.0 + min(1.0, (queue_s + fetch_s + prefill_s + decode_s) / promised.deadline_s))
        if promised.tpot_s is not None:
            rest *= 1.0 + min(1.0, step_s / promised.tpot_s)
    # the learnt time of a further sequence includes the prefills that come with it: only the larger of the two counts
    slower_s = max(work_s, request.sampling.choices * new_tokens * added_s)
    others = backend.mean_weight
    eviction_s = 0.0
    if backend.cache_tokens:
        eviction_s = evicting_s * min(1.0, backend.fresh_tokens / backend.cache_tokens / _USUAL_CHURN)
    running_s, waiting_s = backend.running * slower_s, backend.waiting * work_s
    return Cost(queue_s, fetch_s, prefill_s, decode_s, running_s, waiting_s, eviction_s, first, rest, others)
