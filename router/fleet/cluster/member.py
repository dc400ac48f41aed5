"""One backend and what the router knows of it beside its own reports: health, requests under way, speed."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from backends.base import Backend, Description, Fetched, Lender, Load
from policies.errors import BackendErred, BackendFailed, BackendLacks, BackendLost, IdleLost, Overloaded
from policies.health import Health, HealthRules
from policies.learning.adapters import AdapterSlots, Readiness
from policies.learning.concurrency import AdaptiveLimit, Queue
from policies.learning.cost import (
    NOTHING_AHEAD,
    Ahead,
    FadingSum,
    Latency,
    LatencyModel,
    ObservationSample,
    Peers,
    SlowTime,
    Turnover,
    Work,
    prefill_work,
    prior_of,
)
from policies.nouns import BackendView, Fetch, Link, Request
from policies.rules import BACKGROUND_RANK
from policies.timeouts import Overdue, SlowTimes, between_tokens_s, first_byte_s, first_token_s, overdue, patience_s
from router.fleet.cluster.flights import NOTHING_SEEN, Elsewhere, Flight, Flights, Seen, Traffic
from router.fleet.cluster.listener import ClusterListener
from router.fleet.cluster.server import Server
from router.later import Do, at_once

_NOTHING = Description(models=frozenset())
"""The description of a backend that was never reached."""


class Inputs(NamedTuple):
    """All that a Standing is made from, beside the backend's report, name, pool and kind.

    `flights` is the revision of this router's flights there; `limit` is the adaptive limit.
    """

    description: Description | None
    flights: int
    elsewhere: Traffic
    limit: int
    may_serve: bool
    is_kept_out: bool


class Role(NamedTuple):
    """What a pool is for: its backends can fetch KV from those of the pool `prefill`, or it `only_prefills` itself."""

    prefill: str | None = None
    only_prefills: bool = False


BOTH = Role()
"""Prompts and answers."""

ONLY_PREFILLS = "only_prefills"
"""Why such a backend gets no request of its own."""


class Standing(msgspec.Struct, frozen=True):
    """What is known of a backend whatever the request is. `view` lacks what depends on the request or on time.

    `unseen` requests were sent after the newest report, and `gone` requests of this router that it counts have ended
    since. `theirs` is the prefill that waits there and that this router did not send. `load` is the newest report;
    `reported_tokens` of prefill wait there, reported or sent since, None where the backend does not report them.
    `held_tokens` in the view are those of a prompt that nothing is believed of: none where the backend reports its
    cache, else unknown.
    """

    inputs: Inputs
    load: Load
    description: Description
    view: BackendView
    unseen: int
    gone: int
    reported_tokens: int | None
    theirs: Work


def standing_of(backend: Backend, flights: Flights, load: Load, inputs: Inputs, role: Role = BOTH) -> Standing:
    """The Standing of `backend` in its `role` with the report `load` and `flights` of this router; `inputs` has their
    revision."""
    description, _, others, limit, may_serve, is_kept_out = inputs
    known = description or _NOTHING
    if load.reported_at is None:
        unseen, unseen_tokens, gone = len(flights.open), flights.waiting_tokens, 0
    else:
        unseen, unseen_tokens = flights.unseen(load.reported_at)
        gone = flights.gone(load.reported_at)
    if load.running is None:
        running, late = len(flights.open) - flights.waiting + others.running, 0
    else:
        running, late = max(0, load.running - gone), max(0, gone - load.running)
    waiting = flights.waiting + others.waiting if load.waiting is None else max(0, load.waiting - late) + unseen
    waiting_tokens = others.waiting_tokens if load.waiting_tokens is None else load.waiting_tokens
    reported_tokens = None if load.waiting_tokens is None else load.waiting_tokens + unseen_tokens
    if reported_tokens is None:
        theirs = Work(others.waiting_tokens, others.waiting_pairs)
    else:
        theirs = Work(max(0, reported_tokens - flights.waiting_tokens), 0.0)
    view = BackendView(
        name=backend.name,
        pool=backend.pool,
        kind=backend.kind,
        models=known.models,
        healthy=may_serve and description is not None,
        draining=is_kept_out or load.draining,
        running=running,
        waiting=waiting,
        waiting_tokens=waiting_tokens + unseen_tokens,
        max_requests=load.max_requests,
        free_tokens=None if load.free_tokens is None else max(0, load.free_tokens - unseen_tokens),
        context_tokens=known.context_tokens,
        held_tokens=0 if known.reports_cache else None,
        capabilities=known.capabilities,
        # flights of other routers must not keep this one from its first there: it would never learn the limit
        adaptive_limit=None if load.max_requests is not None else max(limit, running + waiting - len(flights.open) + 1),
        unfit=ONLY_PREFILLS if role.only_prefills else None,
        cache_tokens=load.total_tokens,
        prefill=role.prefill,
        needs_prefill=known.needs_prefill,
        mean_weight=flights.mean_weight,
    )
    return Standing(inputs, load, known, view, unseen, gone, reported_tokens, theirs)


_log = logging.getLogger("pointsman.cluster")

_FRESH_TURNOVER = 0.25
"""Once a quarter of all caches was computed anew, what was computed before counts half. What counts for longer is
evicted already, and all new prompts of a wave would go to the cache that had computed less of it."""

_LEAST_STEPS = 4
"""Steps of decoding that say how long a step takes; fewer are mostly the way of their tokens through the network."""

_MOST_UNCOUNTED = 256
"""Requests that ended well at one server and are not counted yet."""

_NO_FETCHES = Fetched()

_OBSERVED_PER_S, _OBSERVED_AT_ONCE = 20.0, 100.0
"""The model of one backend learns from so many first tokens and ends of requests."""


@dataclass(eq=False, slots=True)
class Member:
    """One backend of a cluster: a server, or one data-parallel rank of it. `server` is what it shares with the other
    ranks, `model` knows how fast it is, `limit` how many requests it takes.

    The limit counts only where the backend does not tell its own, and what other routers have there, `elsewhere`, only
    where it does not tell how much it has to do. `is_leaving`: it is about to be removed.

    `on_predicted` hears of each first token at which backend it came, in how many seconds it had been predicted, and in
    how many it came; `on_health` that it may get requests now, or no longer, or more of them; `on_learnt` that it has
    learnt from the end of a request.
    """

    backend: Backend
    server: Server = field(default_factory=lambda: Server(Health(HealthRules(), random.Random())))
    is_leaving: bool = False
    role: Role = BOTH
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a request there has ended."""
    flights: Flights = field(default_factory=Flights)
    limit: AdaptiveLimit = field(default_factory=AdaptiveLimit)
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    reported: tuple[Latency, int | None] | None = None
    """The speed and the adaptive limit that were last reported."""
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    turnover: Turnover = field(default_factory=Turnover)
    """The clock of all caches of the cluster."""
    fresh: FadingSum = field(default_factory=lambda: FadingSum(_FRESH_TURNOVER))
    """Tokens of prompts that were sent there and not held there, on the clock `turnover`."""
    peers: Peers | None = None
    """What it has in common with others of its pool and kind; None: it has none."""
    model: LatencyModel = field(init=False)
    is_polled: bool = field(init=False)
    """Does the backend tell nothing new between two probes?"""
    lender: Lender | None = field(init=False)
    """The backend, if it exchanges KV with others."""
    lends_until: float = -math.inf
    fetches_until: float = -math.inf
    """When its link is through with what this router has sent for, as predicted: out of it, and into it."""
    fetched: Fetched = _NO_FETCHES
    """The fetches that were learnt from."""
    observed: ObservationSample = field(
        default_factory=lambda: ObservationSample(per_s=_OBSERVED_PER_S, burst=_OBSERVED_AT_ONCE)
    )
    first_byte: SlowTime = field(default_factory=SlowTime)
    """Seconds until it shows that it has a request."""
    told: tuple[Description | None, Load] | None = None
    """What the backend tells of itself, until its next probe; None: it is to be asked."""
    standing: Standing | None = None
    """What was last known of it whatever the request is."""
    was_used: bool = False
    """Has this router sent it any request?"""
    on_predicted: Callable[[str, float, float], None] = lambda *_: None
    on_health: Callable[[Member], None] = lambda _: None
    on_learnt: Callable[[Member], None] = lambda _: None
    later: Do = at_once
    """Does the learning."""

    def __post_init__(self) -> None:
        self.peers = self.peers or Peers(prior_of(self.backend.kind))
        self.model = LatencyModel(self.peers)
        self.lender = self.backend if isinstance(self.backend, Lender) else None
        self.is_polled = getattr(self.backend, "is_polled", False)

    @property
    def health(self) -> Health:
        """Whether its server is well."""
        return self.server.health

    @property
    def healthy(self) -> bool:
        """May it get requests, as far as health goes?"""
        return self.health.may_serve and self.backend.describe() is not None

    @property
    def draining(self) -> bool:
        """Is it to get no new requests: its operators say so, its discovery, or it does itself?"""
        return self.server.is_kept_out or self.is_leaving or self.backend.load().draining

    @property
    def adaptive_limit(self) -> int | None:
        """How many requests it takes at once, as far as its speed tells; None where it tells itself."""
        return self.limit.limit if (self.told or self.ask())[1].max_requests is None else None

    @property
    def reports_cache(self) -> bool:
        """Does the backend itself tell what its cache holds?"""
        description = (self.told or self.ask())[0]
        return description is not None and description.reports_cache

    def may_serve(self, model: str) -> bool:
        """Is it well, not draining, and does it serve `model`?"""
        description = self.backend.describe()
        is_served = description is not None and model in description.models
        is_well = self.server.health.may_serve and not self.server.is_suspect and not self.draining
        return is_served and is_well and not self.role.only_prefills

    def view(
        self,
        now: float,
        held: Mapping[str, int],
        rank: int | None = None,
        prompt_tokens: float = math.inf,
        model: str | None = None,
    ) -> BackendView:
        """This backend as one request of `rank` for `model` with so many `prompt_tokens` sees it at `now`.

        `held` has the tokens that backends are believed to hold. Without a rank nothing is preempted for it, and it is
        served last.
        """
        flights, server, times = self.flights, self.server, self.model
        health = server.health
        if flights.silent and flights.silent[0][0] <= now:
            flights.presume(now)
        standing = self.known()
        load, description, seen_before = standing.load, standing.description, standing.view
        held_tokens = held.get(seen_before.name, seen_before.held_tokens)
        latency, doubt = times.estimate if times.as_of == times.peers.learnt else times.present()
        # first the usual case, which costs no call
        seen, queue_s = NOTHING_SEEN, 0.0
        if flights.preemptible or flights.waiting:
            seen = flights.seen_by(rank if description.preempts else None)
        if flights.waiting or standing.theirs.tokens:
            tokens = max(1.0, prompt_tokens - (held_tokens or 0))
            queue_s = latency.queue_s(self._ahead(now, standing, seen, tokens))
        yielding, decoding_tokens = 0, float(flights.context_tokens)
        if flights.background:
            yielding, decoding_tokens = flights.others_than(rank)
        readiness = self._readiness(model, description, load) if model in description.tuned else None
        share = 1.0 if health.warm_from is None else health.share(now)
        # as `FadingSum.at`, without a call for each backend
        fresh, passed = self.fresh, self.turnover.at - self.fresh.as_of
        return replace(
            seen_before,
            held_tokens=held_tokens,
            reported_s_ago=None if load.reported_at is None else max(0.0, now - load.reported_at),
            weight=server.weight * share,
            latency=latency,
            doubt=doubt,
            queue_s=queue_s if readiness is None else queue_s + self.adapters.seconds(readiness),
            adapter=readiness,
            reclaimable_requests=seen.reclaimable_requests,
            reclaimable_tokens=seen.reclaimable_tokens,
            may_take=None if share >= 1.0 and not health.is_on_trial else self._may_take(share, load),
            fresh_tokens=fresh.sum * 0.5 ** (passed / fresh.half_life) if passed > 0.0 else fresh.sum,
            decoding_tokens=decoding_tokens,
            yielding=yielding,
            link=None if self.lender is None else self._link(self.lender.kv_group, now),
        )

    def may_have_room(self, model: str, rank: int, tokens: int) -> bool:
        standing = self.known()
        view = standing.view
        there = view.running + view.waiting
        if not there or not view.healthy or view.draining or model not in view.models:
            return True
        seen = self.flights.seen_by(rank if standing.description.preempts else None)
        limit = view.adaptive_limit if view.max_requests is None else view.max_requests
        if limit is not None and there - seen.reclaimable_requests >= limit:
            return False
        return view.free_tokens is None or tokens <= view.free_tokens + seen.reclaimable_tokens

    def ask(self) -> tuple[Description | None, Load]:
        """What the backend tells of itself now."""
        told = self.backend.describe(), self.backend.load()
        if self.is_polled:
            self.told = told
        return told

    def known(self) -> Standing:
        """What is known whatever the request is: made again when anything that it is made from has changed."""
        told, standing, server = self.told, self.standing, self.server
        if told is None:
            # as `ask`, without a call: every decision asks
            told = self.backend.describe(), self.backend.load()
            if self.is_polled:
                self.told = told
        description, load = told
        inputs = (
            description,
            self.flights.revision,
            self.elsewhere.traffic,
            self.limit.limit if load.max_requests is None else 0,
            (server.health.is_well or server.health.is_on_trial) and not server.is_suspect,
            server.is_kept_out or self.is_leaving,
        )
        # a new report is seldom equal to the one before, of which it has the time
        if standing is None or standing.load is not load or standing.inputs != inputs:
            if load.prefill_s_per_token is not None:
                self.model.note_speed(load.prefill_s_per_token)
            standing = self.standing = standing_of(self.backend, self.flights, load, Inputs(*inputs), self.role)
        return standing

    def begin(
        self,
        request: Request,
        uncached_tokens: int,
        *,
        now: float,
        is_first_try: bool,
        fetch: Fetch | None = None,
    ) -> Flight:
        """`request` is sent at `now`, with a prefill of `uncached_tokens`, of which there is at least one, behind those
        of `fetch`."""
        flights = self.flights
        if flights.silent and flights.silent[0][0] <= now:
            flights.presume(now)
        uncached_tokens, standing = max(1, uncached_tokens), self.standing
        if standing is None or standing.inputs.flights != flights.revision:
            standing = self.known()
        # else it is that of the view that it was chosen on, a moment ago
        load, description, ahead = standing.load, standing.description, NOTHING_AHEAD
        if flights.waiting or standing.theirs.tokens:
            seen = flights.seen_by(request.rank if description.preempts else None)
            ahead = self._ahead(now, standing, seen, uncached_tokens)
        there = len(self.flights.open) + self.elsewhere.traffic.running + self.elsewhere.traffic.waiting
        if load.running is not None:
            there = max(0, load.running + (load.waiting or 0) - standing.gone) + standing.unseen
        times, cached = self.model, max(0, request.prompt_tokens - uncached_tokens)
        latency = times.estimate[0] if times.as_of == times.peers.learnt else times.snapshot()
        readiness = self._readiness(request.model, description, load) if request.model in description.tuned else None
        adapter_s = 0.0 if readiness is None else self.adapters.seconds(readiness)
        queue_s = adapter_s if ahead is NOTHING_AHEAD else latency.queue_s(ahead) + adapter_s
        # as `Latency.prefill_s`, without a call: every request asks
        work_s = uncached_tokens * (latency.token_s + latency.pair_s * (cached + uncached_tokens / 2))
        fetch_s = 0.0 if fetch is None else fetch.seconds
        flight = Flight(
            self.backend.name,
            request,
            uncached_tokens,
            sent_at=now,
            ahead=ahead,
            crowd=there + 1,
            own_crowd=len(self.flights.open) + 1,
            predicted_ttft_s=max(queue_s, fetch_s) + latency.fixed_s + work_s,
            is_first_try=is_first_try,
            book=self.flights,
            on_first=self._hear_first,
            is_silent=description.may_answer_whole and not request.stream,
            readiness=readiness,
            adapter_s=adapter_s,
            lent=fetch,
        )
        self.flights.begin(flight)
        if readiness is not None:
            self.adapters.begin(request.model)
        if request.rank < BACKGROUND_RANK:
            self.fresh.add(flight.new_tokens, self.turnover.at)
        if fetch is not None:
            self.fetches_until = now + fetch.seconds
        if self.server.trial is None and self.server.health.is_on_trial:
            self.server.trial = flight
        return flight

    def end(self, flight: Flight, failure: BaseException | None, *, now: float) -> None:
        """`flight` is over: well, or by `failure`. Its end tells of health, and unless it failed of speed."""
        server, there = self.server, len(self.flights.open)
        if failure is None and server.trial is None and not server.health.is_on_trial:
            # the usual case: what becomes of it is counted before anything reads it, mostly by `tell_learnt`
            ended = server.health.ended
            ended.append((now, flight.request.tenant))
            if len(ended) >= _MOST_UNCOUNTED:
                server.health.count_ended()
        else:
            self._judge(flight, failure, now)
        company = self.flights.end(flight, now)
        if isinstance(failure, Overloaded):
            self.limit.refuse()
            self.later(self.on_learnt, self)
        elif flight.is_first_try and not isinstance(failure, Exception) and self.observed.takes(now):
            running = (self.backend.load() if self.told is None else self.told[1]).running
            if running is not None and running > there and flight.began_at is not None:
                # requests of other routers: as many as are reported beyond ours, with contexts like ours
                scale = 1.0 + (running - there) / max(1.0, company[0])
                company = company[0] * scale, company[1] * scale
            self.later(self._learn_end, flight, failure is None, company, now)
        if flight.readiness is not None:
            self.adapters.end(flight.request.model)
        self.landed.set()

    def answered_elsewhere(self, request: Request, now: float) -> None:
        """Another backend answers `request`, at which this one failed."""
        before = self.health.may_serve, self.health.is_well
        self.health.answered_elsewhere(now, request.tenant, request.id)
        self._tell(before)

    def probed(self, failure: BackendFailed | None, *, now: float) -> None:
        """A probe passed, or ended with `failure`."""
        before = self.health.may_serve, self.health.is_well
        if failure is None:
            self.health.probe_passed(now)
        else:
            self.health.probe_failed(now, failure.message)
            self.adapters.forget()
            if not self.health.was_well and self.health.probes_failed == self.health.rules.failures:
                # once: it may be away for hours, and operators see the reason of the last probe
                _log.warning("%s is ill: it was never reached: %s", self.backend.name, self.health.reason)
        # a backend that warms up has room for more each time
        self._tell(before, also=self.health.share(now) < 1.0)

    def overdue(self, flight: Flight, now: float) -> Overdue | None:
        """What the backend is late with for `flight`, if it should have come by `now`."""
        quiet_s = now - flight.alive_at
        if quiet_s < self.health.rules.timeouts.least_s or not flight.is_relayed:
            return None
        load, since = self.backend.load(), flight.alive_at
        if load.worked_at is not None:
            since = max(since, load.worked_at)
        if load.waiting:
            # it may be among those that wait there, or have been preempted, and moves up while others are answered
            since = max(since, self.flights.heard_at)
        bounds, slow = self.health.rules.timeouts, self._slow_times(flight)
        if flight.drawn_tokens:
            return overdue("token", now - since, between_tokens_s(bounds, slow), bounds.between_tokens)
        is_first_try, patience = flight.is_first_try, patience_s(flight.request.promised)
        if flight.accepted_at is None:
            timeout_s = first_byte_s(bounds, slow, patience, is_first_try=is_first_try)
            return overdue("byte", now - since, timeout_s, bounds.first_byte)
        timeout_s = first_token_s(bounds, slow, patience, is_first_try=is_first_try)
        return overdue("first token", now - since, timeout_s, bounds.first_token)

    def late_s(self, flight: Flight, quantile: float) -> float | None:
        """Seconds after its sending within which `flight` has its first token in this share of cases.

        None while that is not known, and where the first token is not seen.
        """
        return None if flight.is_silent else self.model.late_ttft_s(flight.predicted_ttft_s, quantile)

    def tell_learnt(self, listener: ClusterListener) -> bool:
        """Tell `listener` what is known of its speed by now, if that has changed; did its adaptive limit change?"""
        self.server.health.count_ended()
        learnt, has_moved = (self.model.snapshot(), self.adaptive_limit), False
        if learnt != self.reported:
            # ten gauges, and an answer that came whole teaches nothing
            has_moved = self.reported is not None and self.reported[1] != learnt[1]
            self.reported = learnt
            listener.learnt(self.backend.name, *learnt)
        load = (self.told or self.ask())[1]
        if load.drafts:
            listener.drafted(self.backend.name, load.drafts)
        if load.disk_blocks:
            listener.on_disk(self.backend.name, load.disk_blocks)
        if load.uncaptured_steps:
            listener.uncaptured(self.backend.name, load.uncaptured_steps)
        if load.fetched is not None and load.fetched != self.fetched:
            self._learn_fetches(load.fetched)
            listener.fetched(self.backend.name, load.fetched)
        return has_moved

    def check(self) -> None:
        """Prove what its parts can prove of themselves."""
        for part in (self.flights, self.limit, self.model, self.health, self.adapters):
            part.check()
        assert self.server.trial is None or self.health.is_on_trial, "a request is on trial, and its backend is not"

    def _link(self, group: str | None, now: float) -> Link | None:
        """Its exchange of KV with others at `now`."""
        if group is None or self.peers is None:
            return None
        lends_s, fetches_s = max(0.0, self.lends_until - now), max(0.0, self.fetches_until - now)
        return Link(group, *self.peers.fetching.rate, lends_s, fetches_s)

    def _learn_fetches(self, fetched: Fetched) -> None:
        """Learn the rate of its fetches from those since the last look. Smaller sums are those of a new process."""
        before = self.fetched if fetched.fetches >= self.fetched.fetches else _NO_FETCHES
        self.fetched = fetched
        if self.peers is not None:
            new = (fetched.fetches - before.fetches, fetched.tokens - before.tokens, fetched.seconds - before.seconds)
            self.peers.fetching.observe(*new)

    def _readiness(self, adapter: str, description: Description, load: Load) -> Readiness:
        known, active = adapter not in description.loadable, load.active_adapters
        return self.adapters.readiness(
            adapter, is_known=known, active=active, slots=load.adapter_slots, ready=load.ready_adapters
        )

    @property
    def _queue(self) -> Queue | None:
        load = self.backend.load()
        if load.reported_at is None or load.running is None or load.waiting is None:
            return None
        return Queue(load.reported_at, load.running, load.waiting)

    def _slow_times(self, flight: Flight) -> SlowTimes:
        flights, theirs, request = self.flights, self.known().theirs, flight.request
        waiting = Work(flights.waiting_tokens + theirs.tokens, flights.waiting_pairs + theirs.pairs)
        step_s, besides_s = self.model.slow_step_s(*self.flights.decoding), flight.adapter_s + flight.fetch_s
        first_s, whole_s = self.model.slow_ttft_s(flight.whole_work, flight.ahead), 0.0
        if flight.is_silent:
            whole_s = request.max_new_tokens * step_s
            if self._is_unproven(flight) and (peers_s := self.model.slow_whole_s(flight.whole_work, flight.ahead)):
                # it has never shown that it answers at all, and a peer that has can give the longest answer
                first_s, whole_s = min(first_s, peers_s), min(whole_s, peers_s)
        gap_s = step_s + self.model.slow_ttft_s(waiting, Ahead())
        return SlowTimes(self.first_byte.p99, first_s + besides_s, whole_s, gap_s)

    def _is_unproven(self, flight: Flight) -> bool:
        """Has nothing come from this backend yet, or nothing since it was ill?"""
        return self.flights.heard_at == -math.inf or flight is self.server.trial

    def _may_take(self, share: float, load: Load) -> int:
        """How many more requests it may get from here while it is on trial, or warms up to its `share`."""
        if self.health.is_on_trial:
            return 0 if self.server.trial else 1
        most = self.limit.limit if load.max_requests is None else load.max_requests
        return max(0, math.ceil(most * share) - len(self.flights.open))

    def _hear_first(self, flight: Flight) -> None:
        """The first piece of its answer came."""
        if flight is self.server.trial and flight.first_at is not None:
            before = self.health.may_serve, self.health.is_well
            self.health.answered(flight.first_at)
            self._tell(before)
        if flight.is_first_try:
            self.later(self._learn_ttft, flight)

    def _judge(self, flight: Flight, failure: BaseException | None, now: float) -> None:
        """What the end of `flight` says of its health. While it is on trial that request alone says anything."""
        health = self.server.health
        before = health.may_serve, health.is_well
        is_trial = flight is self.server.trial
        if is_trial:
            self.server.trial = None
        if is_trial or not health.is_on_trial:
            if failure is None:
                health.request_ended(now, flight.request.tenant)
            elif isinstance(failure, BackendLacks):
                health.request_refused(flight.request.tenant, flight.request.id)
            elif isinstance(failure, BackendFailed) and not isinstance(failure, IdleLost):
                tenant, request = flight.request.tenant, flight.request.id
                may_be_request = isinstance(failure, BackendErred | BackendLost)
                health.request_failed(now, failure.message, tenant, request, may_be_request=may_be_request)
        self._tell(before)

    def _tell(self, before: tuple[bool, bool], *, also: bool = False) -> None:
        health = self.server.health
        if not health.is_on_trial:
            self.server.trial = None
        if also or before != (health.may_serve, health.is_well):
            self.on_health(self)

    def _ahead(self, now: float, standing: Standing, seen: Seen, tokens: float) -> Ahead:
        """The prefill that a prompt of so many `tokens`, sent now, has in front of it of what it has `seen`.

        What this router sent is known prompt by prompt; of what others sent, the sum and at times their number. A
        backend that does not tell what waits there computes all the time, so that what waits becomes less.
        """
        flights, theirs = self.flights, standing.theirs
        if not flights.waiting and not theirs.tokens:
            # the usual case, and asked of each backend for each decision
            return Ahead()
        left = left_of_theirs = 1.0
        if standing.reported_tokens is None:
            left = left_of_theirs = self._left(now, theirs)
        elif flights.waiting:
            left = min(1.0, standing.reported_tokens / flights.waiting_tokens)
        ahead = seen.front.ahead_of(tokens) if flights.waiting else Ahead()
        if left == 1.0 and not theirs.tokens:
            return ahead
        behind = _of_equals(theirs, self.elsewhere.traffic.waiting, tokens) if theirs.tokens else Ahead()
        if left_of_theirs == 1.0 and not flights.waiting:
            return behind
        return Ahead(
            _sum(ahead.alike, left, behind.alike, left_of_theirs),
            _sum(ahead.beyond, left, behind.beyond, left_of_theirs),
        )

    def _left(self, now: float, theirs: Work) -> float:
        """The share of all prefill that waits here, of this router and `theirs`, that is not computed by `now`."""
        flights, busy_since = self.flights, self.elsewhere.busy_since if theirs.tokens else -math.inf
        if flights.waiting:
            busy_since = max(busy_since, flights.busy_since)
        waiting = Work(flights.waiting_tokens + theirs.tokens, flights.waiting_pairs + theirs.pairs)
        return min(1.0, max(0.0, 1.0 - (now - busy_since) / self.model.snapshot().work_s(waiting)))

    def _learn_ttft(self, flight: Flight) -> None:
        if self._was_paused(flight):
            return
        ttft_s = flight.ttft_s
        if flight.accepted_at is not None:
            self.first_byte.observe(flight.accepted_at - flight.sent_at)
        self.on_predicted(flight.backend, flight.predicted_ttft_s, ttft_s)
        if flight.lent is not None:
            # its time is also that of the fetch
            return
        if self._learn_adapter(flight, ttft_s) or not self.observed.takes(flight.sent_at + ttft_s):
            return
        self.model.judge(flight.predicted_ttft_s, ttft_s)
        if self.adaptive_limit is not None:
            cached = max(0, flight.request.prompt_tokens - flight.uncached_tokens)
            idle_s = self.model.snapshot().prefill_s(flight.uncached_tokens, cached)
            self.limit.observe(ttft_s / idle_s, flight.crowd, self._queue)
        if self.reports_cache and not self._was_crowded(flight):
            self.model.observe_ttft(flight.work, flight.ahead, ttft_s)

    def _learn_wait(self, flight: Flight, now: float) -> None:
        """It was cancelled while it waited for its first token, which would have come later than now.

        Without this a backend would look the faster, the more often another one answers first.
        """
        if flight.adapter_s <= 0 and now - flight.sent_at > flight.predicted_ttft_s:
            self.model.judge(flight.predicted_ttft_s, now - flight.sent_at, has_come=False)

    def _learn_adapter(self, flight: Flight, ttft_s: float) -> bool:
        """Learn what its backend took for its LoRA adapter. If it took any time, nothing is learnt of prompts."""
        if flight.readiness is None or flight.adapter_s <= 0:
            return False
        self.adapters.observe(flight.readiness, ttft_s - flight.predicted_ttft_s + flight.adapter_s)
        return True

    def _learn_late(self, flight: Flight) -> None:
        """Only its end told what was cached. An answer in one piece does not tell when its first token was there."""
        one_piece = flight.last_at == flight.first_at and flight.later_tokens > 0
        if (
            flight.first_at is None
            or one_piece
            or flight.lent is not None
            or flight.adapter_s > 0
            or self._was_crowded(flight)
        ):
            return
        self.model.observe_ttft(prefill_work(*_computed(flight)), flight.ahead, flight.ttft_s)

    def _learn_whole(self, flight: Flight, company: tuple[float, float], now: float) -> None:
        """Its first token was not seen; its whole time is learnt from, for prompt and answer together."""
        steps = max(0.0, flight.whole_tokens / flight.request.sampling.choices - 1)
        uncached, cached = _computed(flight)
        batch, context_tokens = company
        took_s, latency = now - flight.sent_at, self.model.snapshot()
        if self._learn_adapter(flight, took_s - steps * latency.tpot_s(batch, context_tokens)):
            return
        if self.adaptive_limit is not None:
            # beside those that decode with it, and without any in front of it
            idle_s = latency.prefill_s(uncached, cached) + steps * latency.tpot_s(batch, context_tokens)
            self.limit.observe(took_s / idle_s, flight.crowd, self._queue)
        if not self._was_crowded(flight):
            self.model.observe_whole(
                prefill_work(uncached, cached),
                flight.ahead,
                took_s,
                steps=steps,
                batch=batch,
                context_tokens=context_tokens,
            )

    def _learn_end(self, flight: Flight, is_whole: bool, company: tuple[float, float], now: float) -> None:
        """Learn from `flight`, which ended at `now`, whole or cancelled, and decoded in this `company`."""
        if not self._was_paused(flight):
            if not is_whole and not flight.answered and not flight.is_silent:
                self._learn_wait(flight, now)
            if is_whole and flight.is_silent:
                self.model.judge_whole(flight.predicted_ttft_s, now - flight.sent_at)
            self._learn_decode(flight, company)
            if is_whole and flight.whole_tokens:
                self._learn_whole(flight, company, now)
            elif is_whole and not self.reports_cache:
                self._learn_late(flight)
        self.on_learnt(self)

    def _learn_decode(self, flight: Flight, company: tuple[float, float]) -> None:
        steps = flight.later_tokens / flight.request.sampling.choices
        if steps < _LEAST_STEPS or flight.first_at is None or flight.last_at is None:
            return
        self.model.observe_decode(*company, (flight.last_at - flight.first_at) / steps)

    def _was_paused(self, flight: Flight) -> bool:
        """May it have waited for others, to which it yields? Its times do not tell what those will take."""
        is_yielding = flight.request.rank >= BACKGROUND_RANK
        return is_yielding and self.flights.others_than(0)[0] < len(self.flights)

    def _was_crowded(self, flight: Flight) -> bool:
        """Was it sent among so many that an unreported queue may have delayed it?

        Requests of other routers do not count: where those never end, nothing would ever be learnt.
        """
        return self.adaptive_limit is not None and self.limit.is_crowded(flight.own_crowd)


def _computed(flight: Flight) -> tuple[int, int]:
    """How many tokens of the prompt were computed and how many were cached, as far as the end of `flight` tells."""
    prompt_tokens, cached = flight.request.prompt_tokens, flight.usage.cached_tokens if flight.usage else 0
    uncached = max(1, min(flight.uncached_tokens, prompt_tokens - cached))
    return uncached, max(0, prompt_tokens - uncached)


def _of_equals(work: Work, prompts: int, tokens: float) -> Ahead:
    """What is in front of a prompt of so many `tokens` where it is known only what all `prompts` are together."""
    share = tokens * max(1, prompts) / work.tokens
    if share >= 1.0:
        return Ahead(work)
    alike = Work(work.tokens * share, work.pairs * share)
    return Ahead(alike, Work(work.tokens - alike.tokens, work.pairs - alike.pairs))


def _sum(work: Work, share: float, other: Work, share_of_other: float) -> Work:
    tokens = work.tokens * share + other.tokens * share_of_other
    return Work(tokens, work.pairs * share + other.pairs * share_of_other)
