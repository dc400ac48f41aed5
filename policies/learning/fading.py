"""Statistics in which old observations count less and less: sums, means, quantiles, samples. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

_USUAL_CACHE_TOKENS = 262_144
"""The size of a cache if its backend does not report it."""

_GUESS_TOKENS = 256
_ANSWER_SHARE = 0.05
"""Weight of one answer: the last forty dominate the mean."""

_SLOW_SHARE = 0.05
_FEWEST = 8
_P99 = 2.33
_NORMAL = NormalDist()


@dataclass(slots=True)
class Turnover:
    """`at` is how many times the caches were computed anew, on average over all of them.

    What a cache keeps depends on how much was computed since, and not on how long that took.
    """

    at: float = 0.0

    def computed(self, tokens: int, *, cache_tokens: int | None, caches: int) -> None:
        """`tokens` are computed for one cache of `cache_tokens` among so many `caches`."""
        self.at += tokens / (cache_tokens or _USUAL_CACHE_TOKENS) / max(1, caches)


@dataclass(slots=True)
class FadingSum:
    """The sum of added amounts, halved every `half_life` of any clock.

    Times may come out of order; the newest counts.
    """

    half_life: float
    sum: float = 0.0
    """As of the newest time, `as_of`."""
    as_of: float = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add `amount`, at least 0, at the time `now`."""
        passed = now - self.as_of
        if passed > 0.0:
            self.sum *= 0.5 ** (passed / self.half_life)
            self.as_of = now
        self.sum += amount

    def at(self, now: float) -> float:
        """The sum at `now`."""
        passed = now - self.as_of
        return float(self.sum * 0.5 ** (passed / self.half_life)) if passed > 0.0 else self.sum


class AnswerLengths:
    """Mean tokens of answers, by tenant and service class, because callers of one class ask for similar things."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        return f"<AnswerLengths of {len(self._means)} kinds>"

    def expected(self, tenant: str, service_class: str, *, most: int) -> int:
        """Expected tokens of an answer that has at most `most`; at least one."""
        mean = self._means.get((tenant, service_class), _GUESS_TOKENS)
        return max(1, min(most, round(mean)))

    def learn(self, tenant: str, service_class: str, tokens: int) -> None:
        """Record an answer of `tokens`."""
        kind = (tenant, service_class)
        mean = self._means.get(kind, float(tokens))
        self._means[kind] = mean + _ANSWER_SHARE * (tokens - mean)


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
        share = max(_SLOW_SHARE, 1.0 / self._seen)
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


class ObservationSample:
    """Takes every observation while few come: `burst` at once, and `per_s` a second in the long run (token bucket).

    Models that forget old observations learn as well from a sample as from all, because within a second nothing changes
    that more observations could show.
    """

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at = burst, 0.0

    def __repr__(self) -> str:
        return f"<ObservationSample of {self._per_s:g} a second, {self._left:.1f} left>"

    def takes(self, now: float) -> bool:
        """Is the observation of time `now`, in seconds, one to learn from? Counts it if it is."""
        left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at, is_taken = now, left >= 1.0
        self._left = left - 1.0 if is_taken else left
        return is_taken
