"""An adaptive concurrency limit, for a backend that does not report its free capacity."""

from __future__ import annotations

import math
from statistics import median
from typing import NamedTuple

_TOLERANCE = 1.5
"""A TTFT up to this many times the TTFT with fewer requests is not taken as a sign of a queue."""

_LEAST_GRADIENT = 0.5
_SMOOTHING = 0.5
_SHORTEST_ROUND, _LONGEST_ROUND = 4, 32
_ROUNDS_BETWEEN_PROBES = 20
_ROUNDS_AFTER_A_FIND = 3
"""Rounds until the next probe after a probe found a queue: half the limit may still be too much."""

_REFUSED = 0.7
_MOST_SLOWDOWN = 1e6


class Queue(NamedTuple):
    """What a backend reported at the time `at` in seconds: so many requests `running` and `waiting` there."""

    at: float
    running: int
    waiting: int


class AdaptiveLimit:
    """The number of requests that a backend runs at once without queueing, found from its TTFTs relative to idle.

    A round has about as many first tokens as the limit allows in flight. Its median slowdown gives the gradient. While
    there is no queue, the limit doubles; after the first queue it grows by its square root per round. A slowdown beyond
    the tolerance shrinks it in proportion, by half at most. It grows only while it is used. The TTFT of an idle backend
    is not known here: callers of `observe` divide by it, so that prompts of any length compare.

    Now and then a round is a probe at half the limit. If the probe is faster by more than the tolerance, there was a
    queue that the observations had come to treat as normal, and the limit shrinks by the same rule. There is no probe
    while other routers send so much that the backend is never half empty.

    Where the backend reports its queue, the reports count instead: a slowdown without a queue has another cause, such
    as a machine that is busy with other work. The limit then shrinks only by the requests that a report saw waiting,
    beyond the limit's root; it grows by its root while reports see fewer, however slow first tokens are; and there are
    no probes. Between reports it grows while first tokens are fast and the newest report saw no request waiting.

    Sources: Gradient2 of Netflix'
    concurrency-limits (2018); TCP Vegas (Brakmo, O'Malley, Peterson, 1994), for slow start and for a queue that grows
    with the limit's root; probing as in BBR (Cardwell et al., 2016).
    """

    def __init__(self, initial: int = 8, *, least: int = 1, most: int = 1024) -> None:
        if not 1 <= least <= initial <= most:
            raise ValueError("a limit must satisfy 1 <= least <= initial <= most")
        self._least, self._most = least, most
        self._limit = float(initial)
        self._proven = float(initial)
        self._starting = True
        self._slowdowns: list[float] = []
        self._busiest = self._strayed = 0
        self._usual: float | None = None
        self._rounds_to_probe = _ROUNDS_BETWEEN_PROBES
        self._newest: Queue | None = None
        self._shortest: Queue | None = None
        self.limit = initial
        """The number of requests that may be in flight."""

    def __repr__(self) -> str:
        state = "probes" if self.is_probing else "starts" if self._starting else "steady"
        return f"<AdaptiveLimit {self.limit} of {self._least} to {self._most}, {state}>"

    @property
    def is_probing(self) -> bool:
        """Is this round at half the limit?"""
        return self._rounds_to_probe == 0

    def is_crowded(self, in_flight: int) -> bool:
        """Are `in_flight` requests so many that their TTFTs give no information about an idle backend?"""
        return in_flight > max(1.0, min(self._proven, self._limit) / 2)

    def observe(self, slowdown: float, in_flight: int, queue: Queue | None = None) -> None:
        """Record a TTFT of `slowdown` times the idle TTFT, with `in_flight` requests there when it was sent.

        `in_flight` counts the request itself. `queue` is the newest report, None where the backend does not tell.
        A slowdown that is not a positive number is ignored.
        """
        if not slowdown > 0:
            return
        self._hear(queue)
        self._follow_state()
        if not self._belongs(in_flight):
            self._stray()
        else:
            self._slowdowns.append(min(slowdown, _MOST_SLOWDOWN))
            self._busiest = max(self._busiest, in_flight)
            if len(self._slowdowns) >= max(_SHORTEST_ROUND, min(_LONGEST_ROUND, self.limit)):
                self._end_round()
        self._follow_state()

    def refuse(self) -> None:
        """Shrink the limit, because the backend rejected a request as overloaded."""
        self._starting = False
        self._set(self._limit * _REFUSED)
        self._follow_state()

    def check(self) -> None:
        """Assert that the limit and the memory are in bounds."""
        assert self._least <= self._limit <= self._most, f"{self!r}: out of bounds"
        assert self._least <= self.limit <= self._most, f"{self!r}: out of bounds"
        assert len(self._slowdowns) < _LONGEST_ROUND, f"{self!r}: a round never ends"
        assert 0 <= self._rounds_to_probe <= _ROUNDS_BETWEEN_PROBES, f"{self!r}: probes come too late"

    def _follow_state(self) -> None:
        """Half as many in a probe."""
        self.limit = max(self._least, int(self._limit if self._rounds_to_probe else self._limit / 2))

    def _hear(self, queue: Queue | None) -> None:
        if queue is None:
            self._newest = self._shortest = None
            return
        self._rounds_to_probe = _ROUNDS_BETWEEN_PROBES
        if self._newest is None or queue.at > self._newest.at:
            self._newest = queue
            # a request that has just arrived waits for the next step: only a queue that stays counts
            if self._shortest is None or queue.waiting < self._shortest.waiting:
                self._shortest = queue

    def _belongs(self, in_flight: int) -> bool:
        """Was it sent in this round? Requests sent before a probe, or before the limit doubled, are not comparable."""
        if not self._rounds_to_probe:
            return in_flight <= self.limit
        return not self._starting or in_flight > self._limit / 2

    def _stray(self) -> None:
        """Give up a probe after more crowded requests than the limit before it: other senders fill the backend."""
        self._strayed += self.is_probing
        if self._strayed > self._limit:
            self._slowdowns, self._busiest, self._strayed = [], 0, 0
            self._rounds_to_probe = _ROUNDS_BETWEEN_PROBES

    def _end_round(self) -> None:
        slowdown, used = median(self._slowdowns), self._busiest >= self._limit / 2
        self._slowdowns, self._busiest, self._strayed = [], 0, 0
        if self._newest is not None:
            self._follow_reports(slowdown, self._newest, used=used)
        elif self.is_probing:
            self._end_probe(slowdown)
        else:
            self._rounds_to_probe -= 1
            self._usual = slowdown if used else None
            self._follow(slowdown, used=used)

    def _end_probe(self, slowdown: float) -> None:
        gradient = 1.0 if self._usual is None else _gradient(self._usual / slowdown)
        self._rounds_to_probe = _ROUNDS_AFTER_A_FIND if gradient < 1.0 else _ROUNDS_BETWEEN_PROBES
        if gradient < 1.0:
            self._starting = False
            self._set(self._limit * gradient)

    def _follow(self, slowdown: float, *, used: bool) -> None:
        gradient = _gradient(slowdown)
        if gradient < 1.0:
            self._starting = False
        elif not used:
            return
        else:
            self._proven = self._limit
        if self._starting:
            self._set(2 * self._limit)
        else:
            target = self._limit * gradient + math.sqrt(self._limit)
            self._set(self._limit + _SMOOTHING * (target - self._limit))

    def _follow_reports(self, slowdown: float, newest: Queue, *, used: bool) -> None:
        queue, self._shortest = self._shortest, None
        root, is_fast = math.sqrt(self._limit), _gradient(slowdown) == 1.0
        if queue is None:
            if is_fast and not newest.waiting:
                self._follow(slowdown, used=used)
        elif queue.waiting > root:
            self._starting = False
            # requests that were sent before it shrank may still be there beyond it
            room = max(self._limit, float(queue.running + queue.waiting)) - queue.waiting
            target = max(_LEAST_GRADIENT * self._limit, room) + root
            self._set(self._limit + _SMOOTHING * min(0.0, target - self._limit))
        elif used and is_fast and not queue.waiting:
            self._follow(slowdown, used=used)
        elif used:
            if not queue.waiting:
                self._proven = self._limit
            self._set(self._limit + _SMOOTHING * (root - queue.waiting))

    def _set(self, limit: float) -> None:
        self._limit = max(float(self._least), min(float(self._most), limit))
        self._proven = min(self._proven, self._limit)


def _gradient(slowdown: float) -> float:
    return max(_LEAST_GRADIENT, min(1.0, _TOLERANCE / slowdown))
