"""Recursive least squares on the logarithms of positive coefficients, with forgetting, clamps and outlier weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

_KEPT_SHARE = 0.98
"""Share of the information that is kept per further observation: about the last 50 count."""

_NOISE = 0.02
"""Variance of the log of an ordinary observation: a deviation of about 14 %."""

_OUTLIER = 0.3
"""An error of the log beyond this counts less and less (Huber's weight)."""

_MOST, _SURPRISE = 1.5, 3.0
"""The largest error of the log that an observation may have: the log of 4.5, so that one hiccup is not taken for the
truth; or this many standard deviations, while little is known."""

_BIAS_SHARE = 0.2
_QUIET = 0.1
_ALERT = 0.5
"""A mean error beyond `_QUIET`, with outliers cut, is drift: it restores part of the first uncertainty, so that new
observations count more again."""

_ORDINARY = (_MOST / _SURPRISE) ** 2
"""Up to this variance of the log of an observation `_MOST` is the larger of the two bounds."""

_CUT = 2 * _OUTLIER
"""Errors of the log count up to this one in their mean."""

_LEAST_VARIANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Prior:
    """The belief about one coefficient before any observation: `value`, and the bounds that it never leaves.

    `spread` is the standard deviation of its own log, and `shared` the one that it has in common with all coefficients
    that have a `shared`: a cause that makes one of them too small makes all of them too small.
    """

    value: float
    least: float
    most: float
    spread: float
    shared: float = 0.0


class RecursiveFit:
    """Positive coefficients of a sum of products, learnt from one observation at a time.

    An observation is log(seen / predicted), and the share of the prediction that was due to each coefficient. So errors
    are relative, coefficients are never negative, and their units do not matter. Source:
    recursive least squares with exponential forgetting (Ljung, System Identification, 1999, section 11.2), linearised
    in the logs as an extended Kalman filter does; Huber's weights against outliers (Robust Statistics, 1981).
    """

    __slots__ = (
        "_bias",
        "_bounds",
        "_covariance",
        "_first",
        "_logs",
        "_most",
        "first_values",
        "observations",
        "values",
    )

    def __init__(self, priors: Sequence[Prior]) -> None:
        self.first_values = tuple(prior.value for prior in priors)
        self.values = list(self.first_values)
        self.observations = 0
        self._logs = [math.log(prior.value) for prior in priors]
        self._bounds = [(math.log(prior.least), math.log(prior.most)) for prior in priors]
        self._first = [
            [row.shared * column.shared + (row.spread**2 if row is column else 0.0) for column in priors]
            for row in priors
        ]
        self._covariance = [list(row) for row in self._first]
        self._most = [row[at] for at, row in enumerate(self._first)]
        self._bias = 0.0

    def __repr__(self) -> str:
        return f"<RecursiveFit {', '.join(f'{value:.2e}' for value in self.values)}, {self.observations} observations>"

    def spread(self, shares: Sequence[float]) -> tuple[list[float], float]:
        """How uncertain a prediction is to which each coefficient contributes its share: the covariance of each log
        with that of the prediction, and the variance of the prediction's log."""
        covariances, variance = [], 0.0
        for share, row in zip(shares, self._covariance, strict=True):
            covariance = sum(map(mul, row, shares))
            covariances.append(covariance)
            variance += covariance * share
        return covariances, variance

    def learn(
        self,
        shares: Sequence[float],
        spread: tuple[list[float], float],
        error: float,
        *,
        beside: float,
        weight: float,
    ) -> None:
        """Move towards an observation: log(seen / predicted) is `error`, and `shares` are its derivatives by the logs.

        `spread` is that of these shares. The other inputs of the prediction have the variance `beside` and take their
        part of the error. `weight` is the share of the prediction that these coefficients make: an observation with
        little information about them makes them forget little.
        """
        moved, variance = spread
        expected = beside + variance
        most = _MOST if expected <= _ORDINARY else _SURPRISE * math.sqrt(expected)
        error = error if abs(error) <= most else math.copysign(most, error)
        cut = error if abs(error) <= _CUT else math.copysign(_CUT, error)
        self._bias += weight * _BIAS_SHARE * (cut - self._bias)
        drift = abs(self._bias) - _QUIET
        if drift > 0.0 and self.observations:
            self._loosen(weight * _ALERT * drift * drift)
            moved, variance = self.spread(shares)
        total = beside + variance + (_NOISE if abs(error) <= _OUTLIER else _NOISE * abs(error) / _OUTLIER)
        self.shift(moved, times=error / total)
        kept = _KEPT_SHARE if weight == 1.0 else _KEPT_SHARE**weight
        covariance = self._covariance
        for at, row in enumerate(covariance):
            scale = moved[at] / total
            for other in range(at):
                row[other] = covariance[other][at] = (row[other] - scale * moved[other]) / kept
            row[at] = (row[at] - scale * moved[at]) / kept
        for at, row in enumerate(covariance):
            if not _LEAST_VARIANCE <= row[at] <= self._most[at]:
                self._clamp(at, row)
        self.observations += 1

    def shift(self, by: Sequence[float], *, times: float = 1.0) -> None:
        """Add `times` the changes `by` to the logs of the first coefficients, as far as their bounds allow."""
        logs, values = self._logs, self.values
        for at, (change, (low, high)) in enumerate(zip(by, self._bounds, strict=False)):
            if change:
                log = logs[at] + times * change
                if not low <= log <= high:
                    log = max(low, min(high, log))
                logs[at], values[at] = log, math.exp(log)

    def check(self) -> None:
        """Assert that values are finite and in bounds, and that the uncertainty has neither vanished nor grown."""
        for log, (low, high), value in zip(self._logs, self._bounds, self.values, strict=True):
            assert low <= log <= high, f"{self!r}: a coefficient left its bounds"
            assert 0.0 < value < math.inf, f"{self!r}: a coefficient is no number"
        for at, row in enumerate(self._covariance):
            assert 0.0 < row[at] <= self._first[at][at] * 1.001, f"{self!r}: uncertainty {row[at]} is out of bounds"
            for other, value in enumerate(row):
                assert value == self._covariance[other][at], f"{self!r}: the covariance is not symmetric"

    def _loosen(self, share: float) -> None:
        """Restore this share of the first uncertainty."""
        for row, first in zip(self._covariance, self._first, strict=True):
            for at, value in enumerate(first):
                row[at] += share * value

    def _clamp(self, at: int, row: list[float]) -> None:
        """Clamp the variance: an unobserved direction would grow without end, and rounding can go below zero."""
        most, variance = self._most[at], row[at]
        if variance > most:
            factor = math.sqrt(most / variance)
            for other in range(len(row)):
                row[other] *= factor
                self._covariance[other][at] = row[other]
            row[at] = most
        else:
            row[at] = _LEAST_VARIANCE
