"""The plan of a log: a pure function of its requests."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from policies.errors import InvalidRequest
from router.fleet.cluster.names import pool_of
from router.operate.diagnose.logged import LogContents, LoggedRequest, Visit
from router.operate.plan.capacity import ENOUGH_ANSWERS, MISSED_AT_MOST, Judged, capacity_of, kept_until
from router.operate.plan.load import Load, Span
from router.operate.plan.nouns import Capacity, HourNeed, Plan, PoolPlan

HOUR_S = 3600

_WORDS = {"requests": "requests in flight", "prompt_tokens": "prompt tokens being computed"}


@dataclass(frozen=True, slots=True)
class _Stay:
    """A request at one backend. Its prompt was computed until `computed_s`, if it was not cached."""

    request: LoggedRequest
    visit: Visit
    end_s: float

    @property
    def computed_s(self) -> float:
        return self.end_s if self.visit.first_s is None else self.visit.first_s

    @property
    def tokens(self) -> int:
        return max(0, self.request.prompt_tokens - (self.request.cached_tokens or 0))

    @property
    def spans(self) -> tuple[Span, Span]:
        """As a request in flight, and as prompt tokens that are computed."""
        sent_s = self.visit.sent_s
        return Span(sent_s, self.end_s), Span(sent_s, self.computed_s, self.tokens)

    @property
    def wanted(self) -> tuple[Span, Span]:
        """The same with enough backends: from its arrival on, and no longer than its targets allow."""
        request = self.request
        compute_s = self.computed_s - self.visit.sent_s
        rest_s = self.end_s - self.computed_s
        if request.ttft_target_s is not None:
            compute_s = min(compute_s, request.ttft_target_s)
        if request.tpot_target_s is not None and request.tpot_s is not None:
            rest_s = min(rest_s, request.tpot_target_s * (request.new_tokens - 1))
        computed_s = request.at_s + compute_s
        return Span(request.at_s, computed_s + rest_s), Span(request.at_s, computed_s, self.tokens)


def plan_of(contents: LogContents, logs: Sequence[Path] = ()) -> Plan:
    """How many backends each pool of the log needed in each hour. `logs` are the files, for the command that verifies.

    Raises InvalidRequest if no request reached a backend, or none has a target.
    """
    requests = contents.requests
    pools, unserved = _pools(requests)
    if not pools:
        hint = "were the backends up at that time? see the field error of the log"
        raise InvalidRequest("no request of the log reached a backend, so there is nothing to plan", hint=hint)
    if not any(map(_has_target, requests)):
        raise InvalidRequest(
            "no request of the log has ttft_target_s or tpot_target_s, so no load is too high",
            hint="set ttft_p95 or tpot_p95 of classes.* and log again; older versions did not log targets",
        )
    planned = tuple(pool.planned(logs) for pool in pools)
    return Plan(len(requests), *_around(requests), planned, tuple(_notes(contents, unserved, len(logs))))


def needs_since(since_s: float, requests: Sequence[LoggedRequest]) -> Mapping[str, HourNeed | None]:
    """Pool -> what the requests that arrived since then needed, by the capacities that all `requests` show.

    None: no request arrived. Empty where `plan_of` raises. `requests` are in order of arrival.
    """
    if not any(map(_has_target, requests)):
        return {}
    pools, _ = _pools(requests)
    return {pool.name: pool.needed_since(since_s) for pool in pools}


def _pools(requests: Sequence[LoggedRequest]) -> tuple[Sequence[_Pool], Mapping[str, Sequence[LoggedRequest]]]:
    """The pools with a backend that got a request, and the requests of each that reached none."""
    stays: dict[str, list[_Stay]] = {}
    for request in requests:
        for stay in _stays(request):
            stays.setdefault(pool_of(stay.visit.backend), []).append(stay)
    if not stays:
        return (), {}
    unserved = _unserved_by_pool(requests, [stay for there in stays.values() for stay in there])
    around = _around(requests)
    return [_Pool(pool, there, unserved.get(pool, ()), around) for pool, there in sorted(stays.items())], unserved


def _around(requests: Sequence[LoggedRequest]) -> tuple[float, float]:
    """From the first arrival to the last end."""
    return requests[0].at_s, max(request.ended_s for request in requests)


class _Measured(NamedTuple):
    """What the answers show of a backend of a pool, with the classes that missed a target at every load."""

    by_tpot: Mapping[str, Sequence[Judged]]
    by_ttft: Mapping[str, Sequence[Judged]]
    capacities: tuple[Capacity, ...]
    too_slow: Set[str]


class _Pool:
    """What the log has of one pool, between the times `around`."""

    def __init__(
        self, name: str, stays: Sequence[_Stay], unserved: Sequence[LoggedRequest], around: tuple[float, float]
    ) -> None:
        self.name = name
        self.around = around
        self.unserved = unserved
        self.served = [stay for stay in stays if stay.visit is stay.request.visits[-1]]
        backends: dict[str, list[_Stay]] = {}
        for stay in stays:
            backends.setdefault(stay.visit.backend, []).append(stay)
        self.running = {name: Load(stay.spans[0] for stay in there) for name, there in backends.items()}
        self.computing = {name: Load(stay.spans[1] for stay in there) for name, there in backends.items()}
        wanted = [stay.wanted for stay in self.served or stays]
        wanted += _usual(unserved, wanted, stays)
        self.wanted_requests = Load(spans[0] for spans in wanted)
        self.wanted_tokens = Load(spans[1] for spans in wanted)

    def needed_since(self, since_s: float) -> HourNeed | None:
        """The need of the requests that arrived since then; None without any."""
        stays = [stay for stay in self.served if stay.request.at_s >= since_s]
        requests = [stay.request for stay in stays]
        requests += [request for request in self.unserved if request.at_s >= since_s]
        if not requests:
            return None
        backends = {stay.visit.backend for stay in stays}
        return self._need_of(requests, (since_s, math.inf), len(backends), self._measured())

    def _measured(self) -> _Measured:
        by_tpot, by_ttft = self._tpots(), self._ttfts()
        capacities = (
            capacity_of("requests", by_tpot, max(load.highest(*self.around) for load in self.running.values())),
            capacity_of("prompt_tokens", by_ttft, max(load.highest(*self.around) for load in self.computing.values())),
        )
        return _Measured(by_tpot, by_ttft, capacities, _never_met(by_tpot) | _never_met(by_ttft))

    def planned(self, logs: Sequence[Path]) -> PoolPlan:
        """The plan of this pool."""
        measured = self._measured()
        hours = tuple(self._hours(measured))
        peak = max(hours, key=lambda hour: (hour.needed or 0, hour.p95_requests, hour.p95_prompt_tokens))
        reasons = _reasons(peak, measured)
        names = " ".join(f"--decisions {shlex.quote(str(log))}" for log in logs[:1])
        return PoolPlan(
            pool=self.name,
            needed=peak.needed,
            bound=peak.bound,
            reasons=tuple(reasons),
            verify=f"pointsman simulate sla.yaml {names or '--decisions LOG'} --find-backends {self.name}",
            capacities=measured.capacities,
            peak=peak,
            hours=hours,
        )

    def _tpots(self) -> Mapping[str, Sequence[Judged]]:
        """Class -> its answers by the mean number of requests in flight while they were decoded."""
        found: dict[str, list[Judged]] = {}
        for stay in self.served:
            request, visit = stay.request, stay.visit
            if request.tpot_target_s is None or request.tpot_s is None or visit.first_s is None:
                continue
            load = self.running[visit.backend].mean(visit.first_s, visit.last_s or stay.end_s)
            found.setdefault(request.service_class, []).append(Judged(load, request.tpot_s > request.tpot_target_s))
        return found

    def _ttfts(self) -> Mapping[str, Sequence[Judged]]:
        """Class -> its answers by the prompt tokens that their backend computed when they came, their own included.

        The time in the router is left out: with enough backends there is none.
        """
        found: dict[str, list[Judged]] = {}
        for stay in self.served:
            request, visit = stay.request, stay.visit
            if request.ttft_target_s is None or visit.first_s is None:
                continue
            load = self.computing[visit.backend].at(visit.sent_s)
            missed = visit.first_s - visit.sent_s > request.ttft_target_s
            found.setdefault(request.service_class, []).append(Judged(load, missed))
        return found

    def _hours(self, measured: _Measured) -> Iterator[HourNeed]:
        """The hours in which requests arrived, in order."""
        arrived: dict[int, list[LoggedRequest]] = {}
        backends: dict[int, set[str]] = {}
        for stay in self.served:
            hour = int(stay.request.at_s // HOUR_S)
            arrived.setdefault(hour, []).append(stay.request)
            backends.setdefault(hour, set()).add(stay.visit.backend)
        for request in self.unserved:
            arrived.setdefault(int(request.at_s // HOUR_S), []).append(request)
        for hour, requests in sorted(arrived.items()):
            span = hour * HOUR_S, (hour + 1) * HOUR_S
            yield self._need_of(requests, span, len(backends.get(hour, ())), measured)

    def _need_of(
        self, requests: Sequence[LoggedRequest], span: tuple[float, float], backends: int, measured: _Measured
    ) -> HourNeed:
        """The need of the `requests` that arrived in `span`, with the load of all that ran in it."""
        between = max(span[0], self.around[0]), min(span[1], self.around[1])
        loads = {
            "requests": self.wanted_requests.quantile(0.95, *between),
            "prompt_tokens": self.wanted_tokens.quantile(0.95, *between),
        }
        short = _short(requests, measured.too_slow)
        needed, bound, limited_by = _need(loads, measured.capacities)
        if short and needed is not None and needed <= backends:
            needed, bound = backends + 1, "at_least"
        elif needed is not None and needed > backends and _sufficed(requests):
            needed, bound = backends, "or_fewer"
        targets = [request for request in requests if _has_target(request)]
        return HourNeed(
            start_s=float(span[0]),
            requests=len(requests),
            unserved=sum(not request.visits for request in requests),
            with_target=len(targets),
            missed=sum(map(_missed, targets)),
            backends=backends,
            p95_requests=loads["requests"],
            most_requests=self.wanted_requests.highest(*between),
            p95_prompt_tokens=loads["prompt_tokens"],
            most_prompt_tokens=self.wanted_tokens.highest(*between),
            needed=needed,
            bound=bound,
            limited_by=limited_by,
            short=short,
        )


def _need(loads: Mapping[str, float], capacities: Sequence[Capacity]) -> tuple[int | None, str, str | None]:
    """The backends for `loads` of a pool, how sure that is, and the measure that needs most."""
    if any(each.amount is None for each in capacities):
        return None, "estimate", None
    needs = [
        (max(1, math.ceil(loads[each.measure] / each.amount)), not each.is_least, each.measure)
        for each in capacities
        if each.amount
    ]
    needed, is_measured, measure = max(needs, default=(1, True, None))
    return needed, "estimate" if is_measured or needed == 1 else "or_fewer", measure


def _never_met(judged: Mapping[str, Sequence[Judged]]) -> set[str]:
    """Classes that missed a target at every load."""
    return {name for name, answers in judged.items() if len(answers) >= ENOUGH_ANSWERS and kept_until(answers) is None}


def _short(requests: Sequence[LoggedRequest], too_slow: Set[str]) -> tuple[str, ...]:
    """Classes with enough requests, of which too many missed a target, although a lower load had met it."""
    count = Counter(request.service_class for request in requests if _has_target(request))
    missed = Counter(request.service_class for request in requests if _has_target(request) and _missed(request))
    return tuple(
        name
        for name in sorted(missed)
        if name not in too_slow and count[name] >= ENOUGH_ANSWERS and missed[name] > MISSED_AT_MOST * count[name]
    )


def _sufficed(requests: Sequence[LoggedRequest]) -> bool:
    """Whether every class with a target has enough requests to judge, and met it."""
    count = Counter(request.service_class for request in requests if _has_target(request))
    return bool(count) and min(count.values()) >= ENOUGH_ANSWERS and not _short(requests, frozenset())


def _has_target(request: LoggedRequest) -> bool:
    return request.ttft_target_s is not None or request.tpot_target_s is not None


def _stays(request: LoggedRequest) -> Iterator[_Stay]:
    ends = [visit.sent_s for visit in request.visits[1:]] + [request.ended_s]
    for visit, end_s in zip(request.visits, ends, strict=False):
        yield _Stay(request, visit, max(visit.sent_s, end_s))


def _missed(request: LoggedRequest) -> bool:
    """Whether a request with a target missed it, waiting in the router included, or reached no backend."""
    late = request.ttft_target_s is not None and request.ttft_s is not None and request.ttft_s > request.ttft_target_s
    slow = request.tpot_target_s is not None and request.tpot_s is not None and request.tpot_s > request.tpot_target_s
    return late or slow or not request.visits


def _unserved_by_pool(
    requests: Sequence[LoggedRequest], stays: Sequence[_Stay]
) -> Mapping[str, Sequence[LoggedRequest]]:
    """Pool -> requests that reached no backend: of their allowed pools, the one that served most of their class."""
    served = Counter((stay.request.service_class, pool_of(stay.visit.backend)) for stay in stays)
    every = Counter(pool_of(stay.visit.backend) for stay in stays)
    found: dict[str, list[LoggedRequest]] = {}
    for request in requests:
        if request.visits:
            continue
        allowed = [pool for pool in sorted(every) if request.pools is None or pool in request.pools]
        if allowed:
            usual = max(allowed, key=lambda pool: (served[request.service_class, pool], every[pool]))
            found.setdefault(usual, []).append(request)
    return found


def _usual(
    unserved: Sequence[LoggedRequest], wanted: Sequence[tuple[Span, Span]], stays: Sequence[_Stay]
) -> list[tuple[Span, Span]]:
    """The load of requests that reached no backend, as if each took the pool's median times."""
    flight_s = median(span.end_s - span.start_s for span, _ in wanted)
    compute_s = median(span.end_s - span.start_s for _, span in wanted)
    uncached = sum(stay.tokens for stay in stays) / sum(stay.request.prompt_tokens for stay in stays)
    return [
        (
            Span(request.at_s, request.at_s + flight_s),
            Span(request.at_s, request.at_s + compute_s, round(uncached * request.prompt_tokens)),
        )
        for request in unserved
    ]


def _reasons(peak: HourNeed, measured: _Measured) -> Iterator[str]:
    """Why the peak hour needs that number of backends."""
    judged = {"requests": measured.by_tpot, "prompt_tokens": measured.by_ttft}
    loads = {"requests": peak.p95_requests, "prompt_tokens": peak.p95_prompt_tokens}
    for each in measured.capacities:
        target = "TPOT" if each.measure == "requests" else "TTFT"
        words = f"{loads[each.measure]:,.0f} {_WORDS[each.measure]} at P95"
        if each.amount is None:
            yield f"{words}; {target} of {each.judged_by} was missed at every load of a backend"
        elif each.is_least:
            yield f"{words}, {each.amount:,.0f} a backend met {target}, and no higher load was seen often enough"
        else:
            yield f"{words}, {target} of {each.judged_by} is met up to {_amount(each)} a backend"
        for name, answers in sorted(judged[each.measure].items()):
            if len(answers) < ENOUGH_ANSWERS:
                yield f"{name} has only {len(answers)} answers with {target}, too few to judge"
            elif each.amount is not None and kept_until(answers) is None:
                yield f"{name} missed its {target} target at every load: more backends alone may not help it"
    if peak.short:
        yield f"too many requests of {', '.join(peak.short)} missed a target, so {peak.backends:,} did not suffice"


def _amount(capacity: Capacity) -> str:
    return f"{capacity.amount or 0:,.{1 if capacity.measure == 'requests' else 0}f}"


def _notes(contents: LogContents, unserved: Mapping[str, Sequence[LoggedRequest]], logs: int) -> Iterator[str]:
    """What the log cannot show, and what was presumed."""
    requests = contents.requests
    if contents.skipped:
        yield f"{contents.skipped:,} lines could not be read: they are not JSON, a crash may have cut them off."
    if contents.left_out:
        yield f"Older requests were left out, {contents.left_out:,} in all: raise --requests to read them."
    if logs > 1:
        yield "The command that verifies reads one log: the first of these."
    refused = sum(map(len, unserved.values()))
    if refused:
        yield (
            f"{refused:,} requests reached no backend. They count as demand and as missed, each with the median times "
            "of its pool. Requests refused by a tenant's limit are not in a log, and clients may have sent some again."
        )
    nowhere = sum(not request.visits for request in requests) - refused
    if nowhere:
        yield f"Requests that may use only pools without an answer in this log: {nowhere:,}. They are not planned."
    seen = {int(request.at_s // HOUR_S) for request in requests}
    silent = max(seen) - min(seen) + 1 - len(seen)
    if silent:
        yield f"{silent:,} hours in between have no request: there was none, or a part of the log is missing."
