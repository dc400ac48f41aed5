"""What is learnt of one backend, with a usable prior: a small model of its latency, quantiles of its times, and how
many tokens it computed of late. Old observations count less and less. Pure."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import msgspec

from policies.learning.fetch import FetchModel
from policies.learning.least_squares import Prior, RecursiveFit

_GUESSED_SPREAD, _REPORTED_SPREAD, _SHAPE_SPREAD, _PACE_SPREAD = 2.3, 0.3, 0.7, 0.3
"""Standard deviations of logs: of a speed that was never measured, of a speed that the backend reports of itself, of
one coefficient relative to the others, and of one backend relative to its peers."""

_FACTOR = 1000.0
"""Coefficients stay within this factor of their priors: a phone's CPU and a rack of GPUs lie within it."""

_ALL_COSTS = (1.0, 1.0, 1.0)
"""A change of all shared coefficients that are costs, which a pace multiplies. They come first."""

_LEVELLED = 0.002
"""The share of a pace's deviation from its first value that moves to the shared coefficients with each observation.
When one backend does most of the work, a slow fleet and a slow backend look the same, and without this the shared
coefficients would drift with the noise."""

_UNSURE, _FORGOTTEN = 0.7, 0.5
"""Standard deviations by which a pace is nearer to that of the peers than its estimate: when it was just measured, and
in addition for each observation that an equal share of the peers' observations since would have brought it."""

_LATELY = 0.05
"""The share of one observation in the mean pace of all peers: about the last 20 count."""

_SLOW_SHARE, _FEWEST = 0.05, 8
"""The share of one value in its quantiles, and how many values these take at least."""

_P99 = 2.33
_NORMAL = NormalDist()

_UNSEEN_SCATTER = 0.25
"""The variance of the log of the time to a first token, in predicted ones, before enough predictions were compared."""

_ERROR_SHARE = 0.1
_MOST_ERROR = 10.0
"""A relative error beyond this counts as this value."""

_USUAL_CACHE_TOKENS = 262_144
"""The size of a cache if its backend does not report it."""


class Work(msgspec.Struct, frozen=True, order=True, gc=False):
    """The quantities that determine prefill time: new `tokens`, and `pairs`, the sum of positions they attend to."""

    tokens: float = 0.0
    pairs: float = 0.0


class Ahead(msgspec.Struct, frozen=True, gc=False):
    """The prefill queued before a prompt. `alike`: of each queued prompt, at most as much work as this prompt has.
    `beyond`: the rest of their work.
    """

    alike: Work = Work()
    beyond: Work = Work()


NOTHING_AHEAD = Ahead()
"""The usual case."""


def prefill_work(uncached: float, cached: float = 0.0) -> Work:
    """The work of computing `uncached` tokens behind `cached` ones."""
    return Work(uncached, uncached * (cached + uncached / 2))


class Latency(msgspec.Struct, frozen=True):
    """The coefficients of one backend's latency, all in seconds except `queue` and `convoy`. The defaults are a guess
    for a model of 8 to 70 billion parameters on a data centre's GPU.

    Prefill takes `fixed_s` + `token_s` for each token + `pair_s` for each position that a token attends to. A decode
    step takes `step_s` + `sequence_s` for each sequence + `context_s` for each position of their contexts. A prompt
    waits for the share `queue` of the prefill queued before it, counting each queued prompt up to its own length, and
    for the share `convoy` of the rest: 1 and 1 if prompts are computed one after the other, 1 and 0 if they share steps
    (processor sharing), less if short prompts go first.
    """

    fixed_s: float = 0.02
    token_s: float = 5e-5
    pair_s: float = 2e-9
    queue: float = 1.0
    convoy: float = 1.0
    step_s: float = 0.01
    sequence_s: float = 1e-4
    context_s: float = 3e-8

    def work_s(self, work: Work) -> float:
        """Seconds that `work` takes."""
        return self.token_s * work.tokens + self.pair_s * work.pairs

    def prefill_s(self, uncached: float, cached: float = 0.0) -> float:
        """Seconds from the start of a prefill to its first token: `uncached` tokens behind `cached` ones."""
        return self.fixed_s + uncached * (self.token_s + self.pair_s * (cached + uncached / 2))

    def queue_s(self, ahead: Ahead) -> float:
        """Seconds that a prompt waits for the prefill queued before it."""
        alike, beyond = ahead.alike, ahead.beyond
        alike_s = self.token_s * alike.tokens + self.pair_s * alike.pairs
        return self.queue * alike_s + self.convoy * (self.token_s * beyond.tokens + self.pair_s * beyond.pairs)

    def ttft_s(self, uncached: float, cached: float = 0.0, *, queue_s: float = 0.0) -> float:
        """Seconds from sending a prompt to its first token, including `queue_s` in the backend's queue."""
        return queue_s + self.prefill_s(uncached, cached)

    def tpot_s(self, batch: float = 1.0, context_tokens: float = 0.0) -> float:
        """Seconds of one decode step of `batch` sequences with contexts of `context_tokens` in total."""
        return self.step_s + self.sequence_s * batch + self.context_s * context_tokens

    def answer_s(self, uncached: float, cached: float, new_tokens: float, *, batch: float = 1.0) -> float:
        """Backend seconds that a whole request uses: its prefill and its share of the decoding.

        Each of the `batch` sequences pays an equal part of the fixed cost of a step. The fair queue charges this.
        """
        context_tokens = cached + uncached + new_tokens / 2
        share_s = self.step_s / max(1.0, batch) + self.sequence_s + self.context_s * context_tokens
        prefill_s = self.fixed_s + uncached * (self.token_s + self.pair_s * (cached + uncached / 2))
        return prefill_s + new_tokens * share_s


TYPICAL = Latency()
"""The prior of a backend of unknown kind."""

PRIORS = {"ollama": Latency(0.05, 5e-4, 1e-8, 1.0, 1.0, 0.03, 1e-3, 1e-7)}
"""Kind of backend -> its prior, for kinds that differ from the default."""


def prior_of(kind: str) -> Latency:
    """The prior of a backend of this kind, used before any observation."""
    return PRIORS.get(kind, TYPICAL)


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


class Peers:
    """The coefficients that similar backends share: their Latency, except how much faster or slower each of them is.

    One backend observes too little to separate the cost of a token from the effect of a queue; and for a backend
    without observations there would be no estimate at all.
    """

    def __init__(self, prior: Latency = TYPICAL) -> None:
        self.prior = prior
        costs = [_coefficient(cost) for cost in (prior.fixed_s, prior.token_s, prior.pair_s)]
        queue = Prior(prior.queue, least=0.01, most=2.0, spread=1.0)
        convoy = Prior(prior.convoy, least=0.001, most=2.0, spread=2.0)
        decode_costs = [_coefficient(cost) for cost in (prior.step_s, prior.sequence_s, prior.context_s)]
        self.prefill = _Common(RecursiveFit([*costs, queue, convoy]))
        self.decode = _Common(RecursiveFit(decode_costs))
        self.fetching = FetchModel()
        self.first_tokens, self.wholes = SlowTime(), SlowTime()
        """What any of them took for a first token, and for an answer in one piece, in predicted times to a first
        token."""
        self.models: weakref.WeakSet[LatencyModel] = weakref.WeakSet()
        """All that share them."""
        self.count = 0
        """How many these were at the last observation, or when the last one began."""
        self.learnt = 0
        """Grows with each observation."""

    def __repr__(self) -> str:
        return f"<Peers {self.prefill.fit!r}, {self.decode.fit!r}>"


class LatencyModel:
    """One backend's Latency, learnt from observations. `error` and `bias` measure the quality of its predictions.

    `error` is the mean of |predicted - seen| / seen, `bias` that of (predicted - seen) / seen, over about the last ten.
    All `peers` learn the shared coefficients together, and each backend learns its own pace. Before its first
    observation a backend is assumed to be like its peers, apart from the speed that it reports of itself.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        self.peers = peers or Peers()
        self.peers.models.add(self)
        self.peers.count = len(self.peers.models)
        self._prefill = _Pace(self.peers.prefill, 1.0, _PACE_SPREAD)
        self._decode = _Pace(self.peers.decode, 1.0, _PACE_SPREAD)
        self._reported: float | None = None
        # the estimate and its doubt, as of so many observations of all peers
        self.estimate: tuple[Latency, tuple[float, float]] = (self.peers.prior, (1.0, 1.0))
        self.as_of = -1
        self._scatter = SlowTime()
        self.error = 0.0
        self.bias = 0.0

    def __repr__(self) -> str:
        return f"<LatencyModel {self.snapshot()}, error {self.error:.0%}>"

    @property
    def observations(self) -> int:
        """The number of first tokens that it learnt from."""
        return self._prefill.fit.observations

    def snapshot(self) -> Latency:
        """The present estimate."""
        return self.present()[0]

    def present(self) -> tuple[Latency, tuple[float, float]]:
        """The present estimate, and its `doubt`. It is `estimate` unless its peers have `learnt` more by now."""
        peers = self.peers
        if self.as_of != peers.learnt:
            doubts = []
            for pace in (self._prefill, self._decode):
                # between its own pace and that of its peers, as _Pace says why
                missed = (pace.common.fit.observations - pace.measured_at) / peers.count
                nearer, off = (_UNSURE + _FORGOTTEN * missed) * pace.spread, pace.off - pace.common.off
                doubts.append(math.exp(-max(-nearer, min(nearer, off))))
            prefill, decode = self._prefill.fit.values[0], self._decode.fit.values[0]
            fixed_s, token_s, pair_s, queue, convoy = peers.prefill.fit.values
            step_s, sequence_s, context_s = peers.decode.fit.values
            latency = Latency(
                prefill * fixed_s,
                prefill * token_s,
                prefill * pair_s,
                queue,
                convoy,
                decode * step_s,
                decode * sequence_s,
                decode * context_s,
            )
            self.estimate = latency, (doubts[0], doubts[1])
            self.as_of = peers.learnt
        return self.estimate

    @property
    def doubt(self) -> tuple[float, float]:
        """Prefill and decode at the pace that the backend surely has, in those of `snapshot`."""
        return self.present()[1]

    def note_speed(self, token_s: float | None) -> None:
        """Record that the backend reports a prefill cost of `token_s` per token. Used until its first observation.

        The other prefill costs are scaled by the same factor relative to their priors.
        """
        if token_s is None or self.observations or token_s == self._reported or not 0.0 < token_s < math.inf:
            return
        self._reported = token_s
        factor = max(1.0 / _FACTOR, min(_FACTOR, token_s / self.peers.prior.token_s))
        self._prefill, self.as_of = _Pace(self.peers.prefill, factor, _REPORTED_SPREAD), -1

    def judge(self, predicted_s: float, seen_s: float, *, has_come: bool = True) -> None:
        """Compare `predicted_s`, the prediction when a request was sent, with the observed time to first token, or if
        that has not come, with the time that it was waited for."""
        if not 0.0 < seen_s < math.inf:
            return
        off = max(-_MOST_ERROR, min(_MOST_ERROR, (predicted_s - seen_s) / seen_s))
        self.error += _ERROR_SHARE * (abs(off) - self.error)
        self.bias += _ERROR_SHARE * (off - self.bias)
        if predicted_s > 0.0:
            self._scatter.observe(seen_s / predicted_s)
            if has_come:
                self.peers.first_tokens.observe(seen_s / predicted_s)

    def judge_whole(self, predicted_s: float, seen_s: float) -> None:
        """Compare the same with the time of an answer that came in one piece."""
        if predicted_s > 0.0:
            self.peers.wholes.observe(seen_s / predicted_s)

    def slow_ttft_s(self, work: Work, ahead: Ahead) -> float:
        """Seconds within which the first token of a prompt of this `work`, with the prefill `ahead` of it, comes in 99
        of 100 cases: long while little is known of the backend and its peers.
        """
        scatter, part = self._scatter.p99, self._first_token(work, ahead)
        slow_s = _slow_s(part) * max(1.0, p99_factor(_UNSEEN_SCATTER) if scatter is None else scatter)
        if not self.peers.prefill.fit.observations and (seen := self.peers.first_tokens.p99) is not None:
            # nothing that came could tell the coefficients apart, and yet it came
            return min(slow_s, _usual_s(part) * seen)
        return slow_s

    def slow_whole_s(self, work: Work, ahead: Ahead) -> float | None:
        """Seconds within which answers in one piece to such a prompt came from its peers in 99 of 100 cases; None while
        too few came."""
        seen = self.peers.wholes.p99
        return None if seen is None else _usual_s(self._first_token(work, ahead)) * seen

    def late_ttft_s(self, predicted_s: float, quantile: float) -> float | None:
        """Seconds within which this share of the first tokens come that are predicted in `predicted_s`, of the peers'
        while the backend has sent too few; None while these have too.
        """
        off = self._scatter.quantile(quantile)
        if off is None:
            off = self.peers.first_tokens.quantile(quantile)
        return None if off is None else predicted_s * off

    def slow_step_s(self, batch: float, context_tokens: float) -> float:
        """The same of one decode step of `batch` sequences with contexts of `context_tokens` in total."""
        slow_s = _slow_s(self._steps(1.0, batch, context_tokens))
        if not self.peers.decode.fit.observations:
            # a step of a few sequences takes no longer than the first token of a short prompt
            return min(slow_s, self.slow_ttft_s(prefill_work(1), Ahead()))
        return slow_s

    def observe_ttft(self, work: Work, ahead: Ahead, seconds: float) -> None:
        """Learn that a prompt of this `work`, sent with the prefill `ahead` of it, took `seconds` to its first token.

        A duration that is not positive and finite is ignored.
        """
        self._observe(seconds, self._first_token(work, ahead))

    def observe_decode(self, batch: float, context_tokens: float, seconds_per_step: float) -> None:
        """Learn the duration of a step in which `batch` sequences decoded `context_tokens` of context, on average."""
        self._observe(seconds_per_step, self._steps(1.0, batch, context_tokens))

    def observe_whole(
        self, work: Work, ahead: Ahead, seconds: float, *, steps: float, batch: float, context_tokens: float
    ) -> None:
        """Learn that an answer in one piece took `seconds`: prefill as in `observe_ttft`, then `steps` steps of decode
        as in `observe_decode`.

        The error is divided between prefill and decode. Answers of different lengths tell the two apart.
        """
        parts = (self._first_token(work, ahead), self._steps(steps, batch, context_tokens))
        self._observe(seconds, *(part for part in parts if part.usual_s > 0.0))

    def check(self) -> None:
        """Assert that every coefficient is a positive number within its bounds."""
        for part in (self.peers.prefill, self.peers.decode, self._prefill, self._decode):
            part.fit.check()

    def _observe(self, seconds: float, *parts: _Part) -> None:
        """Update the shared coefficients and the pace of each of `parts` after a duration of `seconds` in all.

        Each fit treats the variance of the others as noise: a Kalman filter of all, without their correlation.
        """
        if not 0.0 < seconds < math.inf:
            return
        self.peers.learnt += 1
        self.peers.count = len(self.peers.models)
        usual_s = together_s = 0.0
        for part in parts:
            usual_s += part.usual_s * part.pace.fit.values[0]
            together_s += part.usual_s
        error, variance = math.log(seconds) - math.log(usual_s), 0.0
        updates = []
        for part in parts:
            scale = part.pace.fit.values[0] / usual_s
            weight = part.usual_s * scale
            for fit, on in ((part.pace.common.fit, part.on), (part.pace.fit, (part.usual_s,))):
                shares = [scale * second for second in on]
                spread = fit.spread(shares)
                variance += spread[1]
                updates.append((fit, shares, spread, weight))
        for fit, shares, spread, weight in updates:
            fit.learn(shares, spread, error, beside=max(0.0, variance - spread[1]), weight=weight)
        for part in parts:
            fit = part.pace.fit
            back = _LEVELLED * part.usual_s / together_s * math.log(fit.first_values[0] / fit.values[0])
            fit.shift((back,))
            part.pace.common.fit.shift(_ALL_COSTS, times=-back)
            part.pace.measured()

    def _first_token(self, work: Work, ahead: Ahead) -> _Part:
        """The estimated seconds to a first token, by coefficient."""
        fixed_s, token_s, pair_s, queue, convoy = self.peers.prefill.fit.values
        alike_tokens_s, alike_pairs_s = queue * token_s * ahead.alike.tokens, queue * pair_s * ahead.alike.pairs
        beyond_tokens_s, beyond_pairs_s = convoy * token_s * ahead.beyond.tokens, convoy * pair_s * ahead.beyond.pairs
        costs = (
            fixed_s,
            token_s * work.tokens + alike_tokens_s + beyond_tokens_s,
            pair_s * work.pairs + alike_pairs_s + beyond_pairs_s,
        )
        waits = (alike_tokens_s + alike_pairs_s, beyond_tokens_s + beyond_pairs_s)
        return _Part(self._prefill, (*costs, *waits), sum(costs))

    def _steps(self, steps: float, batch: float, context_tokens: float) -> _Part:
        """The estimated seconds of `steps` steps of decode, by coefficient."""
        step_s, sequence_s, context_s = self.peers.decode.fit.values
        costs = (steps * step_s, steps * sequence_s * batch, steps * context_s * context_tokens)
        return _Part(self._decode, costs, sum(costs))


class _Common:
    """What similar backends have in common: their coefficients for prefill, or for decode, learnt by `fit`; and `off`,
    the mean of the logs of their paces, in first ones, over the last observations.
    """

    __slots__ = ("fit", "off")

    def __init__(self, fit: RecursiveFit) -> None:
        self.fit = fit
        self.off = 0.0


class _Pace:
    """A backend's times of prefill, or of decode, in those by the coefficients that it has in `common` with its peers.

    `fit` has it as its one value, which was `first` with a standard deviation of its log of `spread`. `off` is the log
    of its value, in first ones, when it was last measured, after the observation number `measured_at` of all peers.

    The value that it surely has (`LatencyModel.doubt`) is between its own and that of the peers that were measured of
    late. Else one slow answer, for instance the first of an engine that compiles its kernels, or the last before an
    engine was stopped for a while, would send the requests of a quiet hour elsewhere, and the backend would never be
    measured again.
    """

    __slots__ = ("common", "fit", "measured_at", "off", "spread")

    def __init__(self, common: _Common, first: float, spread: float) -> None:
        self.common = common
        self.fit = RecursiveFit([Prior(first, least=1.0 / _FACTOR, most=_FACTOR, spread=spread)])
        self.measured_at, self.off, self.spread = common.fit.observations, 0.0, spread

    def measured(self) -> None:
        """It was just learnt from an observation."""
        self.measured_at = self.common.fit.observations
        self.off = math.log(self.fit.values[0] / self.fit.first_values[0])
        self.spread = math.sqrt(self.fit.spread((1.0,))[1])
        self.common.off += _LATELY * (self.off - self.common.off)


class _Part(NamedTuple):
    """One part of an estimated duration: `usual_s` seconds by the shared coefficients, times the `pace` of the backend.
    `on` are the seconds of `usual_s` that depend on each shared coefficient.
    """

    pace: _Pace
    on: tuple[float, ...]
    usual_s: float


def _usual_s(part: _Part) -> float:
    return part.usual_s * part.pace.fit.values[0]


def _slow_s(part: _Part) -> float:
    usual_s = _usual_s(part)
    _, variance = part.pace.common.fit.spread([seconds / part.usual_s for seconds in part.on])
    _, pace_variance = part.pace.fit.spread((1.0,))
    return usual_s * p99_factor(variance + pace_variance)


def _coefficient(prior: float) -> Prior:
    least, most = prior / _FACTOR, prior * _FACTOR
    return Prior(prior, least=least, most=most, spread=_SHAPE_SPREAD, shared=_GUESSED_SPREAD)


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
