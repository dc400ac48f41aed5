"""The fit of positive coefficients is recursive least squares on their logs, written out for few numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.least_squares import Prior, RecursiveFit

PRIORS = (
    Prior(0.02, least=2e-5, most=20.0, spread=0.7, shared=2.3),
    Prior(5e-5, least=5e-8, most=0.05, spread=0.7, shared=2.3),
    Prior(2e-9, least=2e-12, most=2e-6, spread=0.7, shared=2.3),
    Prior(1.0, least=0.01, most=2.0, spread=1.0),
    Prior(1.0, least=0.001, most=2.0, spread=2.0),
)


class Observation(NamedTuple):
    shares: tuple[float, ...]
    error: float
    beside: float
    weight: float


class Matrices:
    """The same fit with matrices, as the books have it."""

    def __init__(self, priors: tuple[Prior, ...]) -> None:
        shared = np.array([prior.shared for prior in priors])
        self.first = np.outer(shared, shared) + np.diag([prior.spread**2 for prior in priors])
        self.covariance = self.first.copy()
        self.logs = np.log([prior.value for prior in priors])
        self.low, self.high = np.log([(prior.least, prior.most) for prior in priors]).T
        self.bias, self.observations = 0.0, 0

    def learn(self, seen: Observation) -> None:
        shares = np.array(seen.shares)
        variance = shares @ self.covariance @ shares
        most = max(1.5, 3.0 * math.sqrt(seen.beside + variance))
        error = float(np.clip(seen.error, -most, most))
        self.bias += seen.weight * 0.2 * (float(np.clip(error, -0.6, 0.6)) - self.bias)
        drift = abs(self.bias) - 0.1
        if drift > 0.0 and self.observations:
            self.covariance = self.covariance + seen.weight * 0.5 * drift**2 * self.first
        moved = self.covariance @ shares
        total = seen.beside + 0.02 * max(1.0, abs(error) / 0.3) + shares @ moved
        self.logs = np.clip(self.logs + error / total * moved, self.low, self.high)
        self.covariance = (self.covariance - np.outer(moved, moved) / total) / 0.98**seen.weight
        variances, most_variances = np.diag(self.covariance), np.diag(self.first)
        scales = np.sqrt(np.minimum(1.0, most_variances / np.maximum(variances, 1e-6)))
        self.covariance = self.covariance * np.outer(scales, scales)
        np.fill_diagonal(self.covariance, np.maximum(np.diag(self.covariance), 1e-6))
        self.observations += 1


@st.composite
def observations(draw: st.DrawFn, coefficients: int) -> Observation:
    parts = draw(st.lists(st.sampled_from((0.0, 0.1, 1.0, 5.0)), min_size=coefficients, max_size=coefficients))
    parts[0] += 0.01
    shares = tuple(part / sum(parts) for part in parts)
    weight = draw(st.sampled_from((1.0, 0.6, 0.05)))
    return Observation(shares, draw(st.floats(-4.0, 4.0)), draw(st.sampled_from((0.0, 0.01, 0.2))), weight)


@pytest.mark.parametrize("priors", [PRIORS, PRIORS[:3], PRIORS[:1]], ids=["five", "three", "one"])
@given(st.data())
def test_it_is_the_same_as_with_matrices_but_for_rounding(priors: tuple[Prior, ...], data: st.DataObject) -> None:
    fit, matrices = RecursiveFit(priors), Matrices(priors)
    for seen in data.draw(st.lists(observations(len(priors)), max_size=30)):
        spread = fit.spread(seen.shares)
        fit.learn(seen.shares, spread, seen.error, beside=seen.beside, weight=seen.weight)
        matrices.learn(seen)
        fit.check()
        assert fit.values == pytest.approx(np.exp(matrices.logs), rel=1e-9)
        assert fit.spread(seen.shares)[1] == pytest.approx(
            seen.shares @ matrices.covariance @ np.array(seen.shares), rel=1e-6, abs=1e-12
        )


def test_many_observations_of_one_kind_leave_every_number_in_its_bounds() -> None:
    fit = RecursiveFit(PRIORS)
    for number in range(20_000):
        shares = (0.5, 0.3, 0.2, 0.0, 0.0)
        fit.learn(shares, fit.spread(shares), 0.1 * math.sin(number), beside=0.0, weight=1.0)
    fit.check()
    assert fit.observations == 20_000
    assert all(variance > 0.0 for variance in fit.spread((1.0, 0.0, 0.0, 0.0, 0.0))[0][:1])


def test_a_shift_moves_the_first_coefficients_up_to_their_bounds() -> None:
    fit = RecursiveFit(PRIORS)
    fit.shift((1.0, 1.0), times=math.log(2.0))
    assert fit.values[:3] == pytest.approx([0.04, 1e-4, 2e-9])
    fit.shift((1.0,), times=100.0)
    assert fit.values[0] == pytest.approx(20.0)
    fit.check()
