"""The time of a fetch of KV from another backend, learned from the fetches that backends report."""

from __future__ import annotations

import math
from typing import NamedTuple

from policies.learning.least_squares import Prior, RecursiveFit

FIXED_S, TOKEN_S = 0.02, 15e-6
"""The prior: seconds of any fetch, and of each token: 128 KiB of an 8B model at 9 GB/s."""

_FACTOR = 1000.0
"""Coefficients stay within this factor of the prior."""

_GUESSED_SPREAD, _SHAPE_SPREAD = 1.5, 0.7
"""Standard deviations of logs: of both coefficients together, and of one relative to the other."""


class FetchRate(NamedTuple):
    """Seconds of a fetch: `fixed_s`, and `token_s` for each token."""

    fixed_s: float = FIXED_S
    token_s: float = TOKEN_S


class FetchModel:
    """The FetchRate of similar backends, learned together."""

    def __init__(self) -> None:
        self._fit = RecursiveFit([_coefficient(FIXED_S), _coefficient(TOKEN_S)])
        self.rate = FetchRate()

    def __repr__(self) -> str:
        return f"<FetchModel {self.rate}, {self._fit.observations} observations>"

    def observe(self, fetches: int, tokens: int, seconds: float) -> None:
        """Learn that so many `fetches` of `tokens` in total took `seconds` in total.

        Observations without a fetch or without a positive, finite duration are ignored.
        """
        if fetches <= 0 or tokens < 0 or not 0.0 < seconds < math.inf:
            return
        fixed_s, tokens_s = fetches * self.rate.fixed_s, tokens * self.rate.token_s
        predicted_s = fixed_s + tokens_s
        shares = (fixed_s / predicted_s, tokens_s / predicted_s)
        error = math.log(seconds / predicted_s)
        self._fit.learn(shares, self._fit.spread(shares), error, beside=0.0, weight=1.0)
        self.rate = FetchRate(*self._fit.values)

    def check(self) -> None:
        """Assert that both coefficients are positive numbers within their bounds."""
        self._fit.check()


def _coefficient(prior: float) -> Prior:
    return Prior(prior, prior / _FACTOR, prior * _FACTOR, spread=_SHAPE_SPREAD, shared=_GUESSED_SPREAD)
