"""Bursts: many requests at once with prompts that begin alike, where no backend holds that beginning yet. Pure.

Computed once, it serves all of them: a request waits in the router while a backend computes the beginning of its
prompt, and then goes where it is served soonest, which may be another backend that fetches the KV.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from msgspec.structs import replace

from policies.fetch import COMPUTES
from policies.nouns import BackendView, ClusterView, Decision, Request
from policies.predict import predicted_ttft_s, promised_ttft_s
from policies.waiting import AWAITS_BLOCKS, ROOM

LEAST_TOKENS = 1024
"""A request waits for no less than this. It is less than a tenth of a second of a usual accelerator."""

LEAST_SHARE = 0.5
"""A request waits for no less than this share of what it must compute: behind a short common beginning so much is left
that the time in the queue is lost."""

PATIENCE = 1.5
"""A request waits if its first token then comes within this many times the seconds that computing alone takes."""

MOST_COMPUTED = 2
"""Backends that compute the same at once before further requests wait for them. Two requests with one new beginning are
no burst yet: waiting for the first one made ordinary workloads slower."""


class Underway(NamedTuple):
    """The first `tokens` of a prompt, which `backend` computes for another request, as predicted in `seconds`."""

    backend: str
    tokens: int
    seconds: float


def held_back(
    request: Request,
    view: ClusterView,
    decision: Decision,
    underway: Collection[Underway],
    *,
    waited_s: float = 0.0,
) -> Decision:
    """`decision` on `view`, or to wait until a backend has computed what others have `underway` of the prompt.

    The request waits where MOST_COMPUTED backends compute most of its prompt, unless it keeps the target of its class
    only by computing that itself, or has its first token much sooner so; `waited_s` is how long it has waited. It does
    not wait to go to one of these backends: the requests meet there.
    """
    if decision.chosen is None or decision.prefill is not None or len(decision.scores) < 2:
        return decision
    if not COMPUTES.isdisjoint(request.needs):
        return decision
    reasons = dict(decision.dropped)
    backends = {
        backend.name: backend
        for backend in view.backends
        if backend.name not in reasons or reasons[backend.name] in ROOM
    }
    known = [each for each in underway if each.backend in backends]
    if len(known) < MOST_COMPUTED:
        return decision
    if any(each.backend == decision.chosen for each in known):
        # they meet there
        return decision
    soonest = min(known, key=lambda each: each.seconds)
    had_tokens, alone_s = _alone(request, backends[decision.chosen], decision, known)
    if soonest.tokens - had_tokens < max(LEAST_TOKENS, LEAST_SHARE * (request.prompt_tokens - had_tokens)):
        return decision
    after_s = soonest.seconds + _rest_s(request, backends[soonest.backend], soonest.tokens)
    if after_s > PATIENCE * alone_s or _only_alone_in_time(request, after_s, alone_s, waited_s):
        return decision
    others = tuple((name, AWAITS_BLOCKS) for name, _ in decision.scores if name not in reasons)
    return replace(
        decision,
        chosen=None,
        dropped=(*decision.dropped, *others),
        predicted_ttft_s=None,
        fetch=None,
        awaits=soonest.backend,
        wait_s=soonest.seconds,
    )


def _alone(
    request: Request, chosen: BackendView, decision: Decision, underway: Collection[Underway]
) -> tuple[int, float]:
    """The tokens that `chosen` has by itself or can fetch by now, and the seconds to its first token."""
    fetch, held_tokens = decision.fetch, chosen.held_tokens or 0
    if fetch is None or any(each.backend == fetch.backend for each in underway):
        # what is not computed yet cannot be fetched
        return held_tokens, predicted_ttft_s(request, chosen)
    return held_tokens + fetch.tokens, decision.predicted_ttft_s or 0.0


def _rest_s(request: Request, backend: BackendView, cached_tokens: int) -> float:
    cached = min(cached_tokens, request.prompt_tokens - 1)
    return backend.latency.prefill_s(request.prompt_tokens - cached, cached)


def _only_alone_in_time(request: Request, after_s: float, alone_s: float, waited_s: float) -> bool:
    """Would it keep its class's target if it computed everything, and miss it if it waited?"""
    promised_s = None if request.promised is None else promised_ttft_s(request.promised)
    return promised_s is not None and waited_s + alone_s <= promised_s < waited_s + after_s
