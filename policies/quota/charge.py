"""The charge of a request against its tenant's quota: estimated before it runs, exact afterwards."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from policies.nouns import Prices, Usage

ANSWER_TOKENS = 1024
"""Most tokens of an answer that are reserved. Clients ask for the longest possible answer and stop far sooner; a longer
one is charged when it ends, into debt if necessary. 1024 is also what LiteLLM reserves for an unknown answer."""

MOST_TOKENS = 10**9
"""More tokens than any request has: larger reports of a backend are cut to this. Keeps levels far below 2**53."""

MOST_PER_TOKEN = 10**6
"""The highest price of a token, in thousandths of a unit."""


class Charge(msgspec.Struct, frozen=True):
    """The charge of one request. `tokens` are those that are computed: uncached prompt and answer. `cost` is in
    thousandths of the unit of `Prices`, so that sums are exact."""

    requests: int = 0
    tokens: int = 0
    cost: int = 0

    def __post_init__(self) -> None:
        if min(self.requests, self.tokens, self.cost) < 0:
            raise ValueError(f"a charge is never negative: {self}")


def charge_of(usage: Usage, prices: Prices) -> Charge:
    """The actual charge of a request that ended, in whatever way, with `usage`."""
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    prompt, cached, output = [min(max(0, tokens), MOST_TOKENS) for tokens in counts]
    return _charge(prompt, prompt - min(prompt, cached), output, prices)


def estimate(
    prompt_tokens: int, *, uncached_tokens: int | None, max_new_tokens: int, choices: int = 1, prices: Prices
) -> Charge:
    """The charge to reserve for one request: the estimated uncached part of its prompt (None: all of it), and for each
    of its `choices` an answer of `max_new_tokens` or ANSWER_TOKENS, whichever is shorter."""
    uncached = prompt_tokens if uncached_tokens is None else min(prompt_tokens, uncached_tokens)
    return _charge(prompt_tokens, uncached, min(max_new_tokens, ANSWER_TOKENS) * choices, prices)


def _charge(prompt: int, uncached: int, output: int, prices: Prices) -> Charge:
    for_uncached, for_cached, for_output = _per_token(prices)
    cost = uncached * for_uncached + (prompt - uncached) * for_cached + output * for_output
    return Charge(requests=1, tokens=uncached + output, cost=cost)


@lru_cache(maxsize=64)
def _per_token(prices: Prices) -> tuple[int, int, int]:
    """Prices of an uncached, a cached and a drawn token, in thousandths of a unit, at most MOST_PER_TOKEN."""
    uncached, cached, output = (
        min(MOST_PER_TOKEN, round(price * 1000)) for price in (prices.uncached, prices.cached, prices.output)
    )
    return uncached, cached, output
