"""What a prompt may have used: what its backend reports, as far as that was asked for. Pure.

A backend that counts wrongly must not empty a budget. What is charged is never more than the answer that was asked for,
and than a prompt may have.
"""

from __future__ import annotations

from msgspec.structs import replace

from policies.nouns import Capability, Usage
from policies.quota.budget import MOST_TOKENS
from router.ask import Ask
from router.call.bid import Bid, Placed

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
