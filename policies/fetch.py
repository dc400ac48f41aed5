"""KV that a backend can fetch from another one instead of computing it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from policies.nouns import BackendView, Capability, ClusterView, Decision, Fetch, Request
from policies.predict import FIRST, least_cost

MOST_HOLDERS = 4
"""Backends of a group that are compared as the source of a fetch: those that hold most of the prompt."""

LEAST_TOKENS = 64
"""A fetch has at least a block."""

COMPUTES = frozenset({Capability.EMBEDDINGS, Capability.RERANK, Capability.MEDIA, Capability.PROMPT_LOGPROBS})
"""What a backend can only do with a prompt that it computes itself."""


def with_offers(request: Request, view: ClusterView) -> ClusterView:
    """`view` in which each backend has its best offer for the prompt of `request`; unchanged if there is none.

    A backend that drains still lends: so its KV survives it. One that is ill does not.
    """
    if not request.may_fetch or not COMPUTES.isdisjoint(request.needs):
        return view
    groups: dict[str, list[BackendView]] = {}
    for backend in view.backends:
        link, held_tokens = backend.link, backend.held_tokens or 0
        if link is not None and held_tokens >= LEAST_TOKENS and backend.healthy and request.model in backend.models:
            groups.setdefault(link.group, []).append(backend)
    if not groups:
        return view
    crowds = {group: _crowd(group, view.backends) for group in groups}
    for group, holders in groups.items():
        groups[group] = sorted(holders, key=_by_worth)[:MOST_HOLDERS]
    backends = tuple([_with_offer(request, backend, groups, crowds) for backend in view.backends])
    return replace(view, backends=backends)


def offer_of(
    request: Request, backend: BackendView, holders: Sequence[BackendView], crowd: float = 0.0
) -> Fetch | None:
    """What `backend` can best fetch from one of `holders`; None: they hold nothing more than it does. `crowd` is the
    group's.

    That is what makes its prompt ready soonest: the fetch begins when both links are free, and a part of it passes
    while the request waits in the queue anyway.
    """
    link, latency, prompt_tokens = backend.link, backend.latency, request.prompt_tokens
    if link is None:
        return None
    own_tokens, best, best_s = backend.held_tokens or 0, None, 0.0
    alone_s = latency.prefill_s(max(1, prompt_tokens - own_tokens), own_tokens)
    for holder in holders:
        tokens = min(holder.held_tokens or 0, prompt_tokens - 1) - own_tokens
        if holder.link is None or tokens < LEAST_TOKENS:
            continue
        seconds = max(link.fetches_s, holder.link.lends_s) + link.fixed_s + link.token_s * tokens
        rest_s = latency.prefill_s(prompt_tokens - own_tokens - tokens, own_tokens + tokens)
        ready_s = max(backend.queue_s, seconds) + rest_s
        if best is None or ready_s < best_s:
            best, best_s = Fetch(holder.name, tokens, seconds, alone_s - rest_s, crowd=crowd), ready_s
    return best


def with_fetch(request: Request, view: ClusterView, decision: Decision) -> Decision:
    """`decision` on `view`, with what the chosen backend fetches if that is worth it."""
    if decision.chosen is None:
        return decision
    chosen = next(backend for backend in view.backends if backend.name == decision.chosen)
    if chosen.offer is None:
        return decision
    _, fetch = least_cost(request, chosen)
    if fetch is None:
        return decision
    held_tokens = (chosen.held_tokens or 0) + fetch.tokens
    rest_s = chosen.latency.prefill_s(max(1, request.prompt_tokens - held_tokens), held_tokens)
    return replace(decision, fetch=fetch, predicted_ttft_s=max(chosen.queue_s, fetch.seconds) + rest_s)


def _with_offer(
    request: Request,
    backend: BackendView,
    groups: Mapping[str, Sequence[BackendView]],
    crowds: Mapping[str, float],
) -> BackendView:
    if backend.link is None or backend.link.group not in groups:
        return backend
    group = backend.link.group
    offer = offer_of(request, backend, groups[group], crowds[group])
    return backend if offer is None else replace(backend, offer=offer)


def _crowd(group: str, backends: Sequence[BackendView]) -> float:
    there = [
        each.running + FIRST * each.waiting for each in backends if each.link is not None and each.link.group == group
    ]
    return sum(there) / len(there)


def _by_worth(holder: BackendView) -> tuple[int, float]:
    """The most tokens first, and of equals the one with the free link."""
    return -(holder.held_tokens or 0), 0.0 if holder.link is None else holder.link.lends_s
