"""The duration of a step: a small model, fitted while the engine runs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

_KEPT_SHARE = 0.98
"""Share of the information that is kept per further step: about the last 50 steps count."""

_PRIOR_WEIGHT = 0.05
"""Weight of the prior, in steps: decides between costs that the observed steps cannot separate."""

_WARM_STEPS = 8
"""After so many steps one far from the prediction is an outlier (a page fault, a busy machine); before it counts."""

_OUTLIER = 4.0

_WEIGHT_BOUND = 2.0
"""A step counts as if it had taken half of its predicted time at least: one that was measured too short, because the
end of the step before was noticed late, would otherwise outweigh a hundred others."""

_SPREAD_SHARE = 0.05
_MOST_SPREAD = 0.5
_MARGIN = 2.0
"""Mean deviations that a planned step stays below its time: 98 of 100 keep it if steps vary evenly, 95 if normally."""

_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """The quantities of a step that determine its time.

    `tokens`: all new tokens. `pairs`: over prefilled tokens, the positions that each attends to. `decode_context`: the
    positions that decoding rows attend to.
    """

    tokens: int = 0
    pairs: float = 0.0
    decode_context: int = 0

    def __add__(self, other: StepShape) -> StepShape:
        return StepShape(
            self.tokens + other.tokens, self.pairs + other.pairs, self.decode_context + other.decode_context
        )


def prefill_shape(computed_tokens: int, tokens: int) -> StepShape:
    """The shape of computing `tokens` of a prompt behind `computed_tokens`."""
    return StepShape(tokens, tokens * (computed_tokens + tokens / 2))


class CostModel:
    """Seconds of a step = fixed + per token + per attended pair + per position of decode context, none negative.

    Least squares over recent steps, each weighted by its own duration (a decode step of 2 ms counts as much as a
    prefill step of 200 ms), pulled weakly towards a prior, solved by a few sweeps of projected coordinate descent. Only
    the ratios of the prior count: the overall speed of the machine comes from the observed steps.
    """

    def __init__(self, prior: tuple[float, float, float, float] = (2e-3, 1e-4, 1e-9, 1e-8)) -> None:
        self._prior = prior
        self._costs = list(prior)
        self._products = [[0.0] * 4 for _ in range(4)]
        self._targets = [0.0] * 4
        self._steps = 0
        self._spread = 0.0

    def __repr__(self) -> str:
        fixed, token, pair, decode = (f"{cost:.2e}" for cost in self._costs)
        return f"CostModel({fixed} s + {token}/token + {pair}/pair + {decode}/context, {self._steps} steps)"

    @property
    def prefill_s_per_token(self) -> float:
        """Marginal cost of a prompt token near the beginning of a context; 0 before the first measurement."""
        return self._costs[1] if self._steps else 0.0

    @property
    def most_share(self) -> float:
        """The share of a step's time that may be planned; the rest is a margin for unpredicted costs."""
        return 1.0 / (1.0 + _MARGIN * self._spread)

    def predict_s(self, shape: StepShape) -> float:
        """Expected seconds of a step."""
        return self._costs[0] + self.marginal_s(shape)

    def marginal_s(self, shape: StepShape) -> float:
        """Expected seconds that `shape` adds to a step that happens anyway."""
        _, token, pair, decode = self._costs
        return token * shape.tokens + pair * shape.pairs + decode * shape.decode_context

    def observe(self, shape: StepShape, elapsed_s: float, *, steps: int = 1) -> None:
        """Learn that `shape` took `elapsed_s`, in `steps` consecutive steps. Durations of 0 or less are ignored."""
        if not elapsed_s > 0:
            return
        weighted_by_s = elapsed_s
        if self._steps >= _WARM_STEPS:
            expected_s = self.predict_s(shape)
            elapsed_s = min(elapsed_s, _OUTLIER * expected_s)
            weighted_by_s = max(elapsed_s, expected_s / _WEIGHT_BOUND)
            off = min(_MOST_SPREAD, abs(elapsed_s / expected_s - 1.0)) if expected_s else 0.0
            self._spread += (1.0 - (1.0 - _SPREAD_SHARE) ** steps) * (off - self._spread)
        features = (1.0, float(shape.tokens), float(shape.pairs), float(shape.decode_context))
        scaled = [feature / weighted_by_s for feature in features]
        target = elapsed_s / weighted_by_s
        kept = _KEPT_SHARE**steps
        weight = (1.0 - kept) / (1.0 - _KEPT_SHARE)
        for row, left in enumerate(scaled):
            self._targets[row] = kept * self._targets[row] + weight * left * target
            for column, right in enumerate(scaled):
                self._products[row][column] = kept * self._products[row][column] + weight * left * right
        self._steps += steps
        self._solve()

    def _solve(self) -> None:
        pace = self._pace()
        for _ in range(_SWEEPS):
            for row, usual in enumerate(self._prior):
                prior = pace * usual
                products = self._products[row]
                others = sum(products[i] * cost for i, cost in enumerate(self._costs) if i != row)
                # the prior in units of itself: an error of 100 % weighs as much as an error of one step
                pull = _PRIOR_WEIGHT / (prior * prior)
                best = (self._targets[row] - others + pull * prior) / (products[row] + pull)
                self._costs[row] = max(0.0, best)

    def _pace(self) -> float:
        """The factor on the prior that fits the observed steps best."""
        fitted = sum(prior * target for prior, target in zip(self._prior, self._targets, strict=True))
        squared = sum(
            left * right * product
            for left, row in zip(self._prior, self._products, strict=True)
            for right, product in zip(self._prior, row, strict=True)
        )
        return fitted / squared
