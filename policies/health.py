"""Health of a backend: a circuit breaker over its probes and its requests, and a slow start afterwards."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.timeouts import USUAL, Timeouts

_SLICES = 10
"""Number of slices of the window of requests; a slice is forgotten as a whole."""

_MOST_TENANTS = 64
"""Tenants that are remembered as served."""

_MOST_IN_ROW = 64
"""Failures in a row that are remembered, unless more of them are needed to make a backend ill."""

_LEAST_SHARE = 0.1
"""The share at which a slow start begins."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a backend counts as ill, and how it recovers.

    A backend is ill after `failures` failures in a row, requests and probes counted separately, or if `failure_share`
    of at least `least_requests` within `window_s` failed. After `retry_s`, which doubles with each failed trial up to
    `longest_retry_s`, and a probe that passes, it gets one request on trial. If that is answered the backend is well,
    and gets its full share of requests after `slow_start_s`.

    After a probe that failed, and while it is not well, it is probed every `retry_probe_s`. A server is suspect once it
    has answered no probe for `suspect_s` and sent no piece of any answer for as long: it gets no requests, and those
    that it has not begun to answer may go elsewhere. `timeouts` bound how long one request waits for it.
    """

    failures: int = 3
    failure_share: float = 0.5
    window_s: float = 30.0
    least_requests: int = 20
    retry_s: float = 1.0
    longest_retry_s: float = 60.0
    slow_start_s: float = 10.0
    probe_every_s: float = 2.0
    probe_timeout_s: float = 5.0
    retry_probe_s: float = 0.5
    suspect_s: float = 3.0
    timeouts: Timeouts = USUAL
    first_probe_every_s: float = 0.1
    """Interval of probes until it is first reached, so that a router is ready as soon as its backends are."""


class Trouble(NamedTuple):
    """The reason why a backend gets no requests, the seconds since then, and whether it was ever well."""

    reason: str
    since_s: float
    was_well: bool


@dataclass(slots=True)
class _Slice:
    """One slice of the window: its number, its requests, and tenant and id of those that failed."""

    number: int
    requests: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


class Health:
    """State of one backend's health: well, ill or on trial (closed, open or half-open in terms of circuit breakers).
    It begins ill; the first probe that passes makes it well.

    `is_cold`: then it also begins with a slow start, because it joins warm backends. Pure: every `now` is in seconds of
    one clock. Sources: circuit breaker, Nygard, Release It! (2007); slow start of upstreams, Envoy.
    """

    def __init__(self, rules: HealthRules, rng: random.Random, *, is_cold: bool = False) -> None:
        self.rules = rules
        self.is_well = self.is_on_trial = False
        self.reason = "it has not been probed yet"
        """Why it became ill; before it was ever well, the reason of the last failed probe."""
        self.ill_since: float | None = None
        """Time since when it gets no requests; None while it gets some, and before the first probe."""
        self._rng, self._is_cold = rng, is_cold
        self.was_well = False
        """Whether it has ever been well."""
        self.probes_failed = 0
        """In a row."""
        self._openings = 0
        # tenant and id of the requests that failed since one ended well
        self._in_row: deque[tuple[str, str]] = deque(maxlen=max(_MOST_IN_ROW, rules.failures))
        # those of them that may be the requests' own fault
        self._doubtful: deque[tuple[str, str]] = deque(maxlen=max(_MOST_IN_ROW, 2 * rules.failures))
        # tenant and id of those that it refused and others may answer
        self._refused: deque[tuple[str, str]] = deque(maxlen=_MOST_IN_ROW)
        self._retry_at: float | None = None
        self.warm_from: float | None = None
        """The begin of its slow start; None while it gets its full share."""
        # oldest first
        self._window: deque[_Slice] = deque(maxlen=_SLICES)
        # tenant -> when its last request ended well, oldest first
        self._served: dict[str, float] = {}
        self.ended: list[tuple[float, str]] = []
        """Time and tenant of requests that ended well, in order, before `count_ended` counts them. Whatever reads the
        counts has that done first, so a caller that adds to it saves a call for each request."""

    def __repr__(self) -> str:
        state = "well" if self.is_well else "on trial" if self.is_on_trial else f"ill: {self.reason}"
        return f"<Health {state}>"

    @property
    def may_serve(self) -> bool:
        """Whether it may get any requests."""
        return self.is_well or self.is_on_trial

    def trouble(self, now: float) -> Trouble | None:
        """The reason why it gets no requests; None if it may get some."""
        if self.may_serve:
            return None
        return Trouble(self.reason, self.ill_s(now), self.was_well)

    def ill_s(self, now: float) -> float:
        """Seconds since it got requests other than a trial; 0 while it is well or was not probed."""
        return 0.0 if self.ill_since is None else max(0.0, now - self.ill_since)

    def share(self, now: float) -> float:
        """Its present share of its full share of requests, in (0, 1]."""
        if self.warm_from is None:
            return 1.0
        past_s = now - self.warm_from
        if past_s >= self.rules.slow_start_s:
            self.warm_from = None
            return 1.0
        return max(_LEAST_SHARE, past_s / self.rules.slow_start_s)

    def probe_passed(self, now: float) -> None:
        """Record that a probe passed."""
        self.probes_failed = 0
        if self.may_serve:
            return
        if not self.was_well:
            self._close(now, slowly=self._is_cold)
        elif self._retry_at is None or now >= self._retry_at:
            self.is_on_trial = True

    def probe_failed(self, now: float, reason: str) -> None:
        """Record that a probe failed or was not answered."""
        self.probes_failed += 1
        if self.may_serve and self.probes_failed >= self.rules.failures:
            # the next probe that passes is as reliable as waiting
            self._open(reason, now=now, retry_at=now)
        elif not self.was_well:
            self.reason = reason
            if self.ill_since is None:
                self.ill_since = now

    def answered(self, now: float) -> None:
        """Record that a request, on trial the trial request, was answered, at least its beginning."""
        if self.is_on_trial:
            self._openings = 0
            self._close(now, slowly=True)

    def request_ended(self, now: float, tenant: str = "") -> None:
        """Record that a request of `tenant` ended without a failure."""
        if self.is_on_trial:
            self.answered(now)
        self.ended.append((now, tenant))
        self.count_ended()

    def count_ended(self) -> None:
        """Count the requests in `ended`."""
        if not self.ended:
            return
        self._in_row.clear()
        self._doubtful.clear()
        for at, tenant in self.ended:
            self._served.pop(tenant, None)
            self._served[tenant] = at
            newest = self._window[-1] if self._window else None
            if newest is None or newest.number != int(at / self.rules.window_s * _SLICES):
                newest = self._slice(at)
            newest.requests += 1
        while len(self._served) > _MOST_TENANTS:
            del self._served[next(iter(self._served))]
        self.ended.clear()

    def request_failed(
        self, now: float, reason: str, tenant: str = "", request: str = "", *, may_be_request: bool = False
    ) -> None:
        """Record that `request` (its id), on trial the trial request, failed by its fault. Overload is no such failure.

        A failure that the request may have caused says nothing by itself, unless as many requests of each of two
        tenants have failed since one ended well as make it ill (one of each, while it is on trial): one tenant may be
        to blame, but hardly two at the same time. `answered_elsewhere` tells of the others.
        """
        self.count_ended()
        if may_be_request:
            self._doubtful.append((tenant, request))
            most = Counter(one for one, _ in self._doubtful).most_common(2)
            if len(most) < 2 or most[1][1] < (1 if self.is_on_trial else self.rules.failures):
                return
            self._in_row.extend(self._doubtful)
        else:
            self._in_row.append((tenant, request))
        self._count_failure(now, reason, (tenant, request))

    def request_refused(self, tenant: str, request: str) -> None:
        """Record that it refused `request` (its id), which a backend that is set up otherwise may answer."""
        self._refused.append((tenant, request))

    def answered_elsewhere(self, now: float, tenant: str, request: str) -> None:
        """Another backend answered `request` (its id), which this one failed or refused: so it was the fault of this
        one, unless other tenants are served here.
        """
        failure = (tenant, request)
        self.count_ended()
        for doubtful, reason in ((self._doubtful, "fails"), (self._refused, "refuses")):
            if failure in doubtful and not self.serves_others(tenant, now):
                doubtful.remove(failure)
                self._in_row.append(failure)
                self._count_failure(now, f"others answer what it {reason}", failure)
                return

    def acquit(self, tenant: str, request: str) -> None:
        """Take back the last failure of `request` (its id), if it was counted: the request was to blame."""
        self.count_ended()
        failure = (tenant, request)
        for failed in (self._in_row, self._doubtful):
            if failure in failed:
                failed.remove(failure)
        for part in reversed(self._window):
            if failure in part.failed:
                part.failed.remove(failure)
                part.requests -= 1
                return

    def serves_others(self, tenant: str, now: float) -> bool:
        """Did a request of another tenant than `tenant` end well within the window?"""
        self.count_ended()
        at = next((at for other, at in reversed(self._served.items()) if other != tenant), None)
        return at is not None and now - at < self.rules.window_s

    def served_since(self, at: float) -> bool:
        """Did any request end well after `at`?"""
        self.count_ended()
        newest = next(reversed(self._served.values()), None)
        return newest is not None and newest > at

    def check(self) -> None:
        """Assert that it is in one state."""
        assert not (self.is_well and self.is_on_trial), f"{self!r} is well and on trial"
        assert not self.is_well or self.was_well, f"{self!r} was never made well"
        assert len(self._window) <= _SLICES, f"{self!r} remembers too much"
        assert all(len(part.failed) <= part.requests for part in self._window), f"{self!r} lost count"

    def _fails_too_often(self) -> bool:
        requests = sum(part.requests for part in self._window)
        failures = sum(len(part.failed) for part in self._window)
        many = requests >= self.rules.least_requests and failures >= self.rules.failure_share * requests
        return many or len(self._in_row) >= self.rules.failures

    def _count_failure(self, now: float, reason: str, failure: tuple[str, str]) -> None:
        newest = self._slice(now)
        newest.requests += 1
        newest.failed.append(failure)
        if self.is_on_trial or (self.is_well and self._fails_too_often()):
            self._open(reason, now=now, retry_at=now + self._pause_s())

    def _slice(self, now: float) -> _Slice:
        """The slice of `now`; older ones than the window are forgotten."""
        number = int(now / self.rules.window_s * _SLICES)
        while self._window and self._window[0].number <= number - _SLICES:
            self._window.popleft()
        if not self._window or self._window[-1].number != number:
            self._window.append(_Slice(number))
        return self._window[-1]

    def _pause_s(self) -> float:
        """Between half and all of a time that doubles, at random, so that routers do not return in step."""
        longest_s = min(self.rules.longest_retry_s, self.rules.retry_s * 2.0 ** min(self._openings, 32))
        return longest_s * self._rng.uniform(0.5, 1.0)

    def _open(self, reason: str, *, now: float, retry_at: float) -> None:
        self.count_ended()
        if self.ill_since is None:
            self.ill_since = now
        self.is_well = self.is_on_trial = False
        self.reason, self._retry_at, self.warm_from = reason, retry_at, None
        self._openings += 1
        self._served.clear()

    def _close(self, now: float, *, slowly: bool) -> None:
        self.count_ended()
        self.is_well, self.is_on_trial, self.was_well = True, False, True
        self.probes_failed = 0
        self._in_row.clear()
        self._window.clear()
        self._retry_at = self.ill_since = None
        self.warm_from = now if slowly and self.rules.slow_start_s > 0 else None
