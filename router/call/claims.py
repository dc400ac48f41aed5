"""What a call reserves before it runs: all that its prompts and answers may use, at the highest price that may hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from policies.nouns import Tenant
from policies.quota.budget import ANSWER_TOKENS, Charge, at_model, descriptors, estimate
from policies.quota.prices import PriceList, Prices
from policies.rules import Facts, Ruling
from router.ask import Ask, Chat
from router.call.admission import Claim
from router.call.bid import Bid
from router.call.gateway import Gateway
from router.call.identify import Identity
from router.call.prepare import LookedUp
from router.fleet.cluster.served_model import ServedModel


def claim_of(
    id: str,  # noqa: A002 - it is the call's id
    ask: Ask,
    prompts: Sequence[LookedUp],
    facts: Facts,
    model: ServedModel,
    identity: Identity,
    tags: Sequence[str],
    prices: PriceList,
    ruling: Ruling,
    gateway: Gateway,
) -> Claim:
    """What one call reserves of its tenant's quota: one request, and the tokens of all its prompts and answers, at the
    highest of `prices` that holds at any pool of its `ruling`.

    `model` is the one that answers; `identity` is that of its caller.
    """
    highest, charges = prices.highest(model.name, ruling.pools), []
    for given, prompt in zip(ask.inputs, prompts, strict=True):
        size = _Size(prompt.tokens.count, prompt.uncached_tokens, facts.max_new_tokens, ask.sampling.choices)
        images = given.images if isinstance(given, Chat) else 0
        charges.append(_charge(size, images, highest, model.name, ruling.pools, gateway))
    whole = charges[0]
    if len(charges) > 1:
        whole = Charge(1, sum([each.tokens for each in charges]), sum([each.cost for each in charges]))
    user = None if ask.user is None else gateway.end_users.counted(facts.tenant, ask.user)
    bound = descriptors(facts.tenant, model.name, identity.key, team=identity.team, user=user, tags=tags)
    return Claim(id, bound, whole)


def claim_at(model: str, claim: Claim, bid: Bid, *, tenant: Tenant, prices: Prices, gateway: Gateway) -> Claim | None:
    """What one prompt reserves where `bid` has it degraded to `model`, beside the `claim` of its call: of what its
    tenant and team may use of that model, the same as if it had asked for it. None where nothing is limited there.
    """
    team = next((one.team for one in claim.descriptors if one.team is not None), None)
    bound = at_model(tenant, model, None if team is None else tenant.teams.get(team))
    limited = tuple(one for one in bound if one not in claim.descriptors)
    if not limited:
        return None
    request = bid.request
    size = _Size(request.prompt_tokens, None, request.max_new_tokens, request.sampling.choices)
    charge = _charge(size, bid.images, prices, model, request.pools, gateway)
    return Claim(f"{request.id}:{model}", limited, charge)


class _Size(NamedTuple):
    """Tokens of one prompt and its answers; `uncached_tokens` None: all of them."""

    prompt_tokens: int
    uncached_tokens: int | None
    max_new_tokens: int
    choices: int


def _charge(
    size: _Size, images: int, prices: Prices, model: str, pools: Collection[str] | None, gateway: Gateway
) -> Charge:
    return estimate(
        size.prompt_tokens,
        uncached_tokens=size.uncached_tokens,
        max_new_tokens=size.max_new_tokens,
        choices=size.choices,
        prices=prices,
        images=images,
        # views of all backends are made only where seconds cost something
        backend_ms=_longest_ms(size, model, pools, gateway) if prices.second else 0,
    )


def _longest_ms(size: _Size, model: str, pools: Collection[str] | None, gateway: Gateway) -> int:
    """The longest time that one of the backends is predicted to take, with the requests that it has now."""
    uncached = size.prompt_tokens if size.uncached_tokens is None else size.uncached_tokens
    new_tokens = min(size.max_new_tokens, ANSWER_TOKENS)
    longest_s = 0.0
    for view in gateway.cluster.view(gateway.clock()).backends:
        if model in view.models and (pools is None or view.pool in pools):
            first_s = view.latency.ttft_s(uncached, size.prompt_tokens - uncached, queue_s=view.queue_s)
            token_s = view.latency.tpot_s(view.running + 1, view.decoding_tokens + size.prompt_tokens)
            longest_s = max(longest_s, first_s + token_s * new_tokens)
    return round(1000 * longest_s)
