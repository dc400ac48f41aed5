"""How long a backend takes: a small model per backend, fitted to what is seen, usable before anything was."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.least_squares import Prior, RecursiveFit
from policies.peers import Peers

_GUESSED_SPREAD, _TOLD_SPREAD, _SHAPE_SPREAD = 2.3, 0.3, 0.7
"""Standard deviations of logs: of a speed that nobody has measured, of one that the backend has measured itself, and of
one coefficient against the others."""

_FACTOR = 1000.0
"""Coefficients stay within this factor of their priors: a phone's CPU and a rack of GPUs lie within it."""

_ERROR_SHARE = 0.1
_MOST_ERROR = 10.0
"""A relative error beyond this counts as this."""


class Work(NamedTuple):
    """Prefill as far as its time depends on it: new `tokens`, and `pairs`, the sum of positions that they attend to."""

    tokens: float = 0.0
    pairs: float = 0.0


def prefill_work(uncached: float, cached: float = 0.0) -> Work:
    """What computing `uncached` tokens behind `cached` ones takes."""
    return Work(uncached, uncached * (cached + uncached / 2))


@dataclass(frozen=True, slots=True)
class Latency:
    """What one backend's time depends on, all in seconds but `queue`. The defaults are a guess: a model of 8 to 70
    billion parameters on a data centre's GPU.

    Prefill takes `fixed_s` + `token_s` for each token + `pair_s` for each position that a token attends to; a step of
    decoding `step_s` + `sequence_s` for each sequence + `context_s` for each position of their contexts. A prompt waits
    for the share `queue` of the prefill in front of it: 1 where prompts are computed one after the other, less where
    they share steps or short ones go first.
    """

    fixed_s: float = 0.02
    token_s: float = 5e-5
    pair_s: float = 2e-9
    queue: float = 1.0
    step_s: float = 0.01
    sequence_s: float = 1e-4
    context_s: float = 3e-8

    def work_s(self, work: Work) -> float:
        """Seconds of computing `work`."""
        return self.token_s * work.tokens + self.pair_s * work.pairs

    def prefill_s(self, uncached: float, cached: float = 0.0) -> float:
        """Seconds from the start of a prompt's prefill to its first token: `uncached` tokens behind `cached` ones."""
        return self.fixed_s + uncached * (self.token_s + self.pair_s * (cached + uncached / 2))

    def queue_s(self, ahead: Work) -> float:
        """Seconds that a prompt waits for the prefill `ahead` of it."""
        return self.queue * self.work_s(ahead)

    def ttft_s(self, uncached: float, cached: float = 0.0, *, queue_s: float = 0.0) -> float:
        """Seconds from sending a prompt to its first token, `queue_s` of them in the backend's queue."""
        return queue_s + self.prefill_s(uncached, cached)

    def tpot_s(self, batch: float = 1.0, context_tokens: float = 0.0) -> float:
        """Seconds of one step of decoding `batch` sequences whose contexts have `context_tokens` together."""
        return self.step_s + self.sequence_s * batch + self.context_s * context_tokens

    def answer_s(self, uncached: float, cached: float, new_tokens: float, *, batch: float = 1.0) -> float:
        """Seconds of the backend's time that a whole request uses: its prefill and its share of the decoding.

        What `batch` sequences need once per step, each of them pays in part. The fair queue charges this.
        """
        context_tokens = cached + uncached + new_tokens / 2
        share_s = self.step_s / max(1.0, batch) + self.sequence_s + self.context_s * context_tokens
        return self.prefill_s(uncached, cached) + new_tokens * share_s


TYPICAL = Latency()
"""What is believed where nothing is known."""

PRIORS = {"ollama": Latency(0.05, 5e-4, 1e-8, 1.0, 0.03, 1e-3, 1e-7)}
"""Kind of backend -> what to believe of one that was not measured yet, where that is not the default."""


def prior_of(kind: str) -> Latency:
    """What is believed of a backend of this kind before anything is seen of it."""
    return PRIORS.get(kind, TYPICAL)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Alike:
    """What is shared by the models of backends that are alike."""

    prefill: Peers = field(default_factory=Peers)
    decode: Peers = field(default_factory=Peers)


class LatencyModel:
    """One backend's Latency, learnt from what is seen. `error` and `bias` say how well predictions came true.

    `error` is the mean of |predicted - seen| / seen, `bias` that of (predicted - seen) / seen, over about the last ten.
    Before anything was seen, the backend is believed to be as far from its `prior`, or from what it told of itself, as
    those that are `alike` turned out to be.
    """

    def __init__(self, prior: Latency = TYPICAL, alike: Alike | None = None) -> None:
        self._prior, self._alike = prior, alike or Alike()
        self._prefill = _prefill_fit(prior, 1.0, _GUESSED_SPREAD)
        costs = (prior.step_s, prior.sequence_s, prior.context_s)
        self._decode = RecursiveFit([_coefficient(cost, 1.0, _GUESSED_SPREAD) for cost in costs])
        self._told: float | None = None
        self._snapshot: Latency | None = None
        self._supposed = (0, 0)
        self.error = 0.0
        self.bias = 0.0

    def __repr__(self) -> str:
        return f"<LatencyModel {self.snapshot()}, error {self.error:.0%}>"

    @property
    def observations(self) -> int:
        """First tokens that it learnt from."""
        return self._prefill.observations

    def snapshot(self) -> Latency:
        """What is known now."""
        self._suppose()
        if self._snapshot is None:
            self._snapshot = Latency(*self._prefill.values, *self._decode.values)
        return self._snapshot

    def told(self, token_s: float | None) -> None:
        """The backend says that prefill costs `token_s` per token. Believed until its first answer was seen.

        The other costs of prefill are taken to be as much higher or lower than their priors.
        """
        if token_s is None or self._prefill.observations or token_s == self._told or not _is_duration(token_s):
            return
        self._told = token_s
        factor = max(1.0 / _FACTOR, min(_FACTOR, token_s / self._prior.token_s))
        self._prefill = _prefill_fit(self._prior, factor, _TOLD_SPREAD)
        self._snapshot, self._supposed = None, (0, 0)

    def judge(self, predicted_s: float, seen_s: float) -> None:
        """A first token that was `predicted_s` away when its request was sent took `seen_s`."""
        if not _is_duration(seen_s):
            return
        off = max(-_MOST_ERROR, min(_MOST_ERROR, (predicted_s - seen_s) / seen_s))
        self.error += _ERROR_SHARE * (abs(off) - self.error)
        self.bias += _ERROR_SHARE * (off - self.bias)

    def observe_ttft(self, work: Work, ahead: Work, seconds: float) -> None:
        """Learn that a prompt of this `work`, sent with the prefill `ahead` of it, took `seconds` to its first token.

        A duration that is not positive and finite says nothing.
        """
        if not _is_duration(seconds):
            return
        self._suppose()
        fixed_s, token_s, pair_s, queue = self._prefill.values
        tokens_s = token_s * (work.tokens + queue * ahead.tokens)
        pairs_s = pair_s * (work.pairs + queue * ahead.pairs)
        waited_s = queue * (token_s * ahead.tokens + pair_s * ahead.pairs)
        predicted_s = fixed_s + tokens_s + pairs_s
        shares = (fixed_s / predicted_s, tokens_s / predicted_s, pairs_s / predicted_s, waited_s / predicted_s)
        self._prefill.learn(shares, math.log(seconds) - math.log(predicted_s))
        self._alike.prefill.hear(self._prefill.moved)
        self._snapshot = None

    def observe_decode(self, batch: float, context_tokens: float, seconds_per_step: float) -> None:
        """Learn what a step took while, on average, `batch` sequences decoded with `context_tokens` of context."""
        if not _is_duration(seconds_per_step):
            return
        self._suppose()
        step_s, sequence_s, context_s = self._decode.values
        sequences_s, contexts_s = sequence_s * batch, context_s * context_tokens
        predicted_s = step_s + sequences_s + contexts_s
        shares = (step_s / predicted_s, sequences_s / predicted_s, contexts_s / predicted_s)
        self._decode.learn(shares, math.log(seconds_per_step) - math.log(predicted_s))
        self._alike.decode.hear(self._decode.moved)
        self._snapshot = None

    def check(self) -> None:
        """Prove that every coefficient is a positive number within its bounds."""
        self._prefill.check()
        self._decode.check()

    def _suppose(self) -> None:
        """Take over what those that are alike taught since this was last called, as far as nothing was seen here."""
        if self._prefill.observations and self._decode.observations:
            return
        changes = (self._alike.prefill.changes, self._alike.decode.changes)
        if changes == self._supposed:
            return
        self._supposed, self._snapshot = changes, None
        for fit, peers in ((self._prefill, self._alike.prefill), (self._decode, self._alike.decode)):
            if peers.moved and not fit.observations:
                fit.suppose(peers.moved)


def _prefill_fit(prior: Latency, factor: float, spread: float) -> RecursiveFit:
    """A fit that begins at `factor` times the prior, of a speed whose log has this `spread`."""
    queue = Prior(prior.queue, least=0.01, most=2.0, spread=1.0)
    costs = (prior.fixed_s, prior.token_s, prior.pair_s)
    return RecursiveFit([*(_coefficient(cost, factor, spread) for cost in costs), queue])


def _coefficient(prior: float, factor: float, spread: float) -> Prior:
    least, most = prior / _FACTOR, prior * _FACTOR
    return Prior(prior * factor, least=least, most=most, spread=_SHAPE_SPREAD, shared=spread)


def _is_duration(seconds: float) -> bool:
    return 0.0 < seconds < math.inf
