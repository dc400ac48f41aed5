"""How much later requests begin for each line of a batch beside them. Pure.

Lines are where few other requests are, so a plain comparison would blame the others. But at times that have nothing to
do with requests, backends rest from lines: requests in these times are compared with all others of about the same
length (an instrumental variable: Angrist and Krueger, Instrumental variables and the search for identification, 2001).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_KEPT_OF_LENGTH = 0.99
"""The share of a length's means that each further request of it leaves."""

_KEPT = 0.9999
"""The share of the comparison that each further request leaves: about the last 10,000 count."""

_GUESS, _GUESS_WEIGHT = 0.01, 500.0
"""First tokens come 1 % later for each line, as sure as after some 500 requests, a tenth of them in rests from ten
lines: two to three times what the simulated shards of `benchmarks/batches.py` need."""

_LEAST = 1e-4
"""Lines that seem to do less, or to speed others up, do this."""

_MOST = 3.0
"""Times count up to this factor of their mean, and from its inverse: a single one says little."""


@dataclass(slots=True)
class _Length:
    """The requests of one length: means of the log of the time for a token, of the lines beside, and of rests."""

    time: float = 0.0
    lines: float = 0.0
    busy: float = 0.0
    weight: float = 0.0


@dataclass(slots=True)
class Company:
    """The effect of lines on the times to first tokens of one pool's other requests."""

    _lengths: dict[int, _Length] = field(default_factory=dict)
    _times: float = _GUESS * _GUESS_WEIGHT
    _lines: float = _GUESS_WEIGHT
    _squares: float = 0.0
    """Of what each request adds to `_times`: the variance of that sum."""

    def add(self, ttft_s: float, *, prompt_tokens: int, lines: int, rests: bool) -> None:
        """A request of so many tokens began its answer after `ttft_s`. It was sent beside so many `lines`, to a backend
        that `rests` from them or does not."""
        tokens, most, busy = max(1, prompt_tokens), math.log(_MOST), 0.0 if rests else 1.0
        length = self._lengths.setdefault(tokens.bit_length(), _Length())
        time = math.log(max(1e-6, ttft_s) / tokens)
        if length.weight >= 1.0:
            time = min(max(time, length.time - most), length.time + most)
            # the part of a request in the means is the smaller the more were before
            off = (busy - length.busy) * length.weight / (1.0 + length.weight)
            added = off * (time - length.time)
            self._times = _faded(self._times, _GUESS * _GUESS_WEIGHT) + added
            self._squares = _KEPT * _KEPT * self._squares + added * added
            self._lines = _faded(self._lines, _GUESS_WEIGHT) + off * (lines - length.lines)
        length.weight = 1.0 + _KEPT_OF_LENGTH * length.weight
        length.time += (time - length.time) / length.weight
        length.lines += (lines - length.lines) / length.weight
        length.busy += (busy - length.busy) / length.weight

    @property
    def slowdown(self) -> float:
        """The share by which one line delays a first token: the estimate and its standard error. So a limit holds
        five times out of six, where the estimate alone would miss it every other time."""
        return max(_LEAST, (self._times + math.sqrt(self._squares)) / max(1.0, self._lines))

    def most_lines(self, slowdown: float) -> float:
        """How many lines delay first tokens by the share `slowdown`."""
        return math.log1p(slowdown) / self.slowdown


def _faded(value: float, guess: float) -> float:
    return guess + _KEPT * (value - guess)
