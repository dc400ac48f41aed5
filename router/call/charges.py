"""What a call asks of its tenant's quota before it runs, and what its prompts may have used when they end.

A backend that counts wrongly must not empty a budget. What is charged is never more than the answer that was asked for,
and than a prompt may have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from policies.nouns import Capability, Tenant, Usage
from policies.quota.budget import (
    ANSWER_TOKENS,
    MOST_TOKENS,
    ONE_REQUEST,
    Charge,
    Reservation,
    at_model,
    descriptors,
    estimate,
    meters,
)
from policies.quota.end_users import EndUsers
from policies.quota.prices import PriceList, Prices
from policies.rules import Facts, Ruling
from router.ask import Ask, Chat
from router.call.bid import Bid, Placed
from router.call.identify import Identity
from router.call.lookup import LookedUp
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Charges:
    """Finds what calls ask for. Where time is priced, the backends of `cluster` tell how long they may take."""

    cluster: Cluster
    clock: Callable[[], float]
    end_users: EndUsers

    def of_call(
        self,
        id: str,  # noqa: A002 - it is the call's id
        ask: Ask,
        prompts: Sequence[LookedUp],
        facts: Facts,
        model: ServedModel,
        identity: Identity,
        tags: Sequence[str],
        prices: PriceList,
        ruling: Ruling,
    ) -> Reservation:
        """What one call asks of its tenant's quota: one request, and the tokens of all its prompts and answers, at the
        highest of `prices` that holds at any pool of its `ruling`.

        `model` is the one that answers; `identity` is that of its caller.
        """
        tenant = facts.tenant
        if ask.user is None and not tags:
            bound = identity.known_bounds.get(model.name) or identity.bound(model.name)
        else:
            user = None if ask.user is None else self.end_users.counted(tenant, ask.user)
            bound = descriptors(tenant, model.name, identity.key, team=identity.team, user=user, tags=tags)
        if not meters(bound):
            # what it costs is known at its end
            return Reservation(id, bound, ONE_REQUEST)
        highest, charges = prices.usual if prices.are_usual else prices.highest(model.name, ruling.pools), []
        for given, (tokens, _, _, uncached) in zip(ask.inputs, prompts, strict=True):
            longest_ms = 0
            if highest.second:
                longest_ms = self._longest_ms(model.name, ruling.pools, tokens.count, uncached, facts.max_new_tokens)
            charge = estimate(
                tokens.count,
                uncached_tokens=uncached,
                max_new_tokens=facts.max_new_tokens,
                choices=ask.sampling.choices,
                prices=highest,
                images=given.images if isinstance(given, Chat) else 0,
                backend_ms=longest_ms,
            )
            charges.append(charge)
        whole = charges[0]
        if len(charges) > 1:
            whole = Charge(1, sum([each.tokens for each in charges]), sum([each.cost for each in charges]))
        return Reservation(id, bound, whole)

    def at_other(
        self, model: str, asked: Reservation, bid: Bid, *, tenant: Tenant, prices: Prices
    ) -> Reservation | None:
        """What one prompt asks where `bid` has it degraded to `model`, beside what its call has `asked`: of what its
        tenant and team may use of that model, the same as if it had asked for it. None where nothing is limited there.
        """
        team = next((one.team for one in asked.descriptors if one.team is not None), None)
        bound = at_model(tenant, model, None if team is None else tenant.teams.get(team))
        limited = tuple(one for one in bound if one not in asked.descriptors)
        if not limited:
            return None
        request = bid.request
        tokens, most, longest_ms = request.prompt_tokens, request.max_new_tokens, 0
        if prices.second:
            longest_ms = self._longest_ms(model, request.pools, tokens, tokens, most)
        charge = estimate(
            tokens,
            uncached_tokens=None,
            max_new_tokens=most,
            choices=request.sampling.choices,
            prices=prices,
            images=bid.images,
            backend_ms=longest_ms,
        )
        return Reservation(f"{request.id}:{model}", limited, charge)

    def _longest_ms(
        self,
        model: str,
        pools: Collection[str] | None,
        prompt_tokens: int,
        uncached_tokens: int,
        max_new_tokens: int,
    ) -> int:
        """The longest time that one of the backends is predicted to take, with the requests that it has now."""
        new_tokens, longest_s = min(max_new_tokens, ANSWER_TOKENS), 0.0
        for view in self.cluster.view(self.clock()).backends:
            if model in view.models and (pools is None or view.pool in pools):
                first_s = view.latency.ttft_s(uncached_tokens, prompt_tokens - uncached_tokens, queue_s=view.queue_s)
                token_s = view.latency.tpot_s(view.running + 1, view.decoding_tokens + prompt_tokens)
                longest_s = max(longest_s, first_s + token_s * new_tokens)
        return round(1000 * longest_s)


PROMPT_FACTOR = 4
PROMPT_MORE = 4096
"""A prompt is charged with at most so many times the tokens that were counted or estimated, and so many beside: engines
have templates of their own, and providers prompts."""


def most_new_tokens(ask: Ask, bid: Bid, context_tokens: int | None = None) -> int:
    """How many tokens the answers to the prompt of `bid` may have in all."""
    request, candidates = bid.request, (bid.prompt.body or {}).get("best_of")
    choices = max(request.sampling.choices, candidates if isinstance(candidates, int) else 0)
    most = context_tokens if ask.max_new_tokens is None else request.max_new_tokens
    return MOST_TOKENS if most is None else most * choices


def used(placed: Placed) -> Usage:
    """The usage as this router counted it, for a backend that has not reported it: what was believed to be cached
    counts as cached.
    """
    bid, flight = placed.bid, placed.flight
    drawn_tokens = flight.drawn_tokens if bid.so_far is None else bid.so_far.tokens
    cached = max(0, bid.request.prompt_tokens - flight.uncached_tokens)
    return Usage(bid.request.prompt_tokens, drawn_tokens, cached)


def completed(usage: Usage, placed: Placed) -> Usage:
    """`usage`, of which a backend did not report all, with what this router counted in place of the rest."""
    counted = used(placed)
    if usage.prompt_tokens and usage.completion_tokens:
        return usage
    return replace(
        usage,
        prompt_tokens=usage.prompt_tokens or counted.prompt_tokens,
        cached_tokens=usage.cached_tokens if usage.prompt_tokens else counted.cached_tokens,
        completion_tokens=usage.completion_tokens or counted.completion_tokens or placed.flight.whole_tokens,
    )


def within_asked(usage: Usage, ask: Ask, placed: Placed) -> Usage:
    """`usage` itself, if that may be true; else what it may be at most."""
    bid, context = placed.bid, placed.chosen.context_tokens
    request, most_prompt = bid.request, context or MOST_TOKENS
    if not bid.images and Capability.MEDIA not in request.needs:
        longest = request.prompt_tokens if request.likely_prompt_tokens is None else request.likely_prompt_tokens[1]
        most_prompt = min(PROMPT_FACTOR * longest + PROMPT_MORE, most_prompt)
    prompt = min(usage.prompt_tokens, most_prompt)
    new = min(usage.completion_tokens, most_new_tokens(ask, bid, context))
    if prompt == usage.prompt_tokens and new == usage.completion_tokens:
        return usage
    return replace(usage, prompt_tokens=prompt, completion_tokens=new, cached_tokens=min(usage.cached_tokens, prompt))
