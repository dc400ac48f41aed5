"""The slow end of a quantity, such as its P99."""

from __future__ import annotations

import math
from statistics import NormalDist

_SHARE = 0.05
_FEWEST = 8
_P99 = 2.33
_NORMAL = NormalDist()


def p99_factor(variance: float) -> float:
    """The P99 of a log-normal quantity, in medians, where the variance of its log is `variance`."""
    return math.exp(_P99 * math.sqrt(variance))


class SlowTime:
    """Learns the quantiles of a positive quantity, as a log-normal one, from about its last twenty values."""

    __slots__ = ("_mean", "_seen", "_variance")

    def __init__(self) -> None:
        self._mean = self._variance = 0.0
        self._seen = 0

    def __repr__(self) -> str:
        return f"<SlowTime {self.p99}>"

    def observe(self, value: float) -> None:
        """Learn from one value; one that is not positive and finite is ignored."""
        if not 0.0 < value < math.inf:
            return
        self._seen = min(self._seen + 1, _FEWEST * 10)
        share = max(_SHARE, 1.0 / self._seen)
        off = math.log(value) - self._mean
        self._mean += share * off
        self._variance = (1.0 - share) * (self._variance + share * off * off)

    @property
    def p99(self) -> float | None:
        """The present estimate; None after too few values."""
        return None if self._seen < _FEWEST else math.exp(self._mean) * p99_factor(self._variance)

    def quantile(self, share: float) -> float | None:
        """The value that `share` of all are below, by the present estimate; None after too few values."""
        if self._seen < _FEWEST:
            return None
        return math.exp(self._mean + _NORMAL.inv_cdf(share) * math.sqrt(self._variance))
