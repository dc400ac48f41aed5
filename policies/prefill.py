"""Whether another backend computes the prompt, so that the chosen one fetches its KV instead. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from policies.learning.fetch import FIXED_S, TOKEN_S
from policies.legs import is_divisible, may_prefill
from policies.nouns import BackendView, ClusterView, Decision, PrefillLeg, Request
from policies.predict import FIRST, cost_of, least_cost, predicted_ttft_s, uncached_tokens

TRANSFER_S, TRANSFER_TOKEN_S = FIXED_S, TOKEN_S
"""Seconds that a transfer is taken to last, and those for each token, where they are not learned."""

WORTH = 0.05
"""A prompt is computed elsewhere if that saves more than this share of the placement's cost: predictions are no more
exact than that, and a transfer is one more thing that can fail."""


def prefill_leg(
    request: Request, chosen: BackendView, backends: Iterable[BackendView], avoiding: Collection[str] = ()
) -> PrefillLeg | None:
    """Which of `backends` computes the prompt of `request` for `chosen`; None: `chosen` does that itself.

    Only those of the pool that `chosen` fetches KV from are asked, without those in `avoiding`. With the leg the
    request has no prefill at `chosen`, so that it stalls nothing there; in exchange it waits at the other backend, and
    for the transfer. A short or held prompt costs little at `chosen`, and an idle `chosen` has nothing to stall: both
    stay there. If `chosen` computes no prompts, every one has the leg.
    """
    if chosen.prefill is None or not (request.may_transfer or chosen.needs_prefill) or not is_divisible(request):
        return None
    alone, _ = least_cost(request, chosen)
    fetched = replace(chosen, held_tokens=request.prompt_tokens, offer=None)
    beside = cost_of(request, fetched)
    fixed_s, token_s = (
        (TRANSFER_S, TRANSFER_TOKEN_S) if chosen.link is None else (chosen.link.fixed_s, chosen.link.token_s)
    )
    fetch_s = fixed_s + token_s * uncached_tokens(request, chosen)
    legs = []
    for backend in backends:
        if backend.pool != chosen.prefill or backend.name in avoiding or not may_prefill(request, backend):
            continue
        ready_s = predicted_ttft_s(request, backend) + fetch_s
        delay_s = backend.waiting * backend.latency.prefill_s(uncached_tokens(request, backend), 0)
        cost = beside.total + alone.first * ready_s + FIRST * backend.mean_weight * delay_s
        legs.append((cost, backend.name, ready_s + predicted_ttft_s(request, fetched)))
    if not legs:
        return None
    cost, name, seconds = min(legs)
    saved = alone.total - cost
    return PrefillLeg(name, seconds, saved) if chosen.needs_prefill or saved > WORTH * alone.total else None


def with_prefill(request: Request, view: ClusterView, decision: Decision, avoiding: Collection[str] = ()) -> Decision:
    """`decision` on `view`, with the backend that computes the prompt for the chosen one if that is worth it, or if
    the chosen one computes none. It is not in `avoiding`."""
    if decision.chosen is None:
        return decision
    chosen = next(backend for backend in view.backends if backend.name == decision.chosen)
    leg = prefill_leg(request, chosen, view.backends, avoiding)
    return decision if leg is None else replace(decision, prefill=leg, fetch=None, predicted_ttft_s=leg.seconds)
