"""All backends: whether they are well, what they have to do, and one immutable view of it for each decision."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from backends.base import Backend, Leaver, Ranked
from policies.blame import FailedTry
from policies.bursts import LEAST_TOKENS
from policies.errors import BackendFailed, BackendHung
from policies.health import Health, HealthRules, Trouble
from policies.learning.cost import Peers, Turnover, prior_of
from policies.nouns import ClusterView, Fetch, Request
from policies.quantities import rounded_seconds
from policies.shortlist import LARGE, Shortlist
from router.fleet.cluster.computing import Computing
from router.fleet.cluster.flights import Elsewhere, Flight, Traffic
from router.fleet.cluster.listener import ClusterListener, Listeners
from router.fleet.cluster.member import Member, Role
from router.fleet.cluster.probes import Probes
from router.fleet.cluster.served_model import Models, ServedModel
from router.fleet.cluster.server import Server
from router.later import Do, at_once
from router.supervise import supervise

_log = logging.getLogger("pointsman.cluster")

MOST_NOTED = 16
"""Changed backends that are noted for the shortlist behind one request, beside those that were scored for it; the
others behind the next requests."""

LATE_EVERY_S = 0.5
"""Time between two looks for backends that are late."""

_MOST_HEIRS = 8
"""Backends that get the KV of one that stops."""

CLOSING_S = 5.0
"""How long a backend that is removed may take to close, and its last requests to notice."""

REPLACING_S = 10.0
"""A backend that takes the place of another one gets no requests before it passes a probe, or for so long."""

_PROBE_AGAIN_S = 0.1


class Cluster:
    """Owns the backends and the tasks that probe them. An async context manager.

    A server that turns out to run its model in several data-parallel ranks becomes one backend for each of them. They
    come and go with what the server tells, are probed as one, and share health, draining and weight.
    `rules` say when a backend is ill; `pool_rules` have others for some pools. `prefill`: pool -> the
    pool that computes prompts for it, and nothing else. Listeners hear what happens. Backends' models learn `later`.
    """

    def __init__(
        self,
        backends: Iterable[Backend] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        rules: HealthRules = HealthRules(),  # noqa: B008 - frozen
        pool_rules: Mapping[str, HealthRules] = MappingProxyType({}),
        prefill: Mapping[str, str] = MappingProxyType({}),
        later: Do = at_once,
    ) -> None:
        self._later = later
        self._clock, self._rng = clock, rng or random.Random()
        self._rules, self._pool_rules, self._prefill = rules, pool_rules, prefill
        self._peers: WeakValueDictionary[tuple[str, str], Peers] = WeakValueDictionary()
        self._members: dict[str, Member] = {}
        self._turnover = Turnover()
        self.on_the_way: dict[Flight, Member] = {}
        """The requests that this router has at backends, removed ones among them: changed here alone."""
        self.computing = Computing(self._tell_computed)
        self.lenders: set[str] = set()
        """The backends that exchange KV with others."""
        self.is_large = False
        """Are there so many backends that only a few are scored for a request?"""
        self.divides = False
        """Has any backend had another pool that computes prompts for it?"""
        self._elsewhere: dict[str, Elsewhere] = {}
        self._listeners = Listeners()
        self.on_changed: Callable[[str], None] = lambda _: None
        """Called with the name of a backend that may have room: a request there has ended, its load was reported (our
        shards do in each step), its health changed or what its operators want of it."""
        self._probes = Probes(self._probe_until_well, self._listeners.reached)
        self._is_open = False
        self._timekeeper: asyncio.Task[None] | None = None
        self._replaced: set[asyncio.Task[None]] = set()
        self._serving: set[str] = set()
        self._health_changed = asyncio.Event()
        self._models = Models()
        self._undescribed: set[str] = set()
        """Backends that may report other models than when they were last asked."""
        self._shortlist = Shortlist()
        # backends of which something changed since they were noted for the shortlist, the longest first
        self._unnoted: OrderedDict[str, None] = OrderedDict()
        # those that were scored since; not every backend announces its reports
        self._scored: dict[str, None] = {}
        self.hold(backends)

    def __repr__(self) -> str:
        states = (f"{name} {'well' if m.healthy else 'ill'} {len(m.flights)}" for name, m in self._members.items())
        return f"<Cluster {', '.join(states)}>"

    def __contains__(self, name: str) -> bool:
        return name in self._members

    async def __aenter__(self) -> Cluster:
        self._is_open = True
        try:
            for name, member in self._members.items():
                self._listeners.health(name, False)
                await member.backend.start()
        except BaseException:
            # those before it were started
            await self.__aexit__()
            raise
        # a first probe may add ranks
        for member in tuple(self._members.values()):
            self._probes.begin(member.backend, member.health.rules)
        self._timekeeper = asyncio.create_task(supervise("timeouts", self._keep_timeouts), name="timeouts")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        if self._timekeeper is not None:
            self._timekeeper.cancel()
            await asyncio.gather(self._timekeeper, return_exceptions=True)
        await self._probes.close()
        for leaving in self._replaced:
            leaving.cancel()
        await asyncio.gather(*self._replaced, return_exceptions=True)
        await asyncio.gather(*(_close(member.backend) for member in self._members.values()))

    def listen(self, listener: ClusterListener) -> None:
        """Let `listener` hear what happens from now on."""
        self._listeners.add(listener)

    def hold(self, backends: Iterable[Backend]) -> None:
        """Have these from the beginning; for a cluster that is not entered yet."""
        assert not self._is_open, "the cluster is open: add them"
        for backend in backends:
            assert backend.name not in self._members, f"two backends are called {backend.name}"
            self._members[backend.name] = self._member(backend, self._server(backend, is_cold=False))

    def traffic(self) -> dict[str, Traffic]:
        """This router's requests at each backend where it has any."""
        return {name: member.flights.traffic() for name, member in self._members.items() if member.flights}

    def traffic_since(self, seen: dict[str, int]) -> dict[str, Traffic]:
        """This router's requests at each backend where they have changed since the last call with the same `seen`.

        `seen` has the revision of the requests at each backend, and is updated; it begins empty.
        """
        changed = {}
        for name, member in self._members.items():
            flights = member.flights
            if flights.revision != seen.get(name, 0):
                seen[name], changed[name] = flights.revision, flights.traffic()
        return changed

    def hear_elsewhere(self, traffic: Mapping[str, Elsewhere]) -> None:
        """Set the requests of all other routers at the backends in `traffic`; a backend may join later."""
        for name, there in traffic.items():
            if there.traffic == Traffic():
                self._elsewhere.pop(name, None)
            else:
                self._elsewhere[name] = there
            if member := self._members.get(name):
                before, member.elsewhere = member.elsewhere, there
                if there.traffic != before.traffic:
                    self.changed(name)

    async def add(self, backend: Backend, *, is_cold: bool = True) -> None:
        """Start `backend` and give it requests as soon as a probe passes; slowly at first if it `is_cold`."""
        name = backend.name
        assert self._is_open, "the cluster is not open"
        assert name not in self._members, f"two backends are called {name}"
        member = self._members[name] = self._member(backend, self._server(backend, is_cold=is_cold))
        self._listeners.health(name, False)
        await backend.start()
        self._probes.begin(member.backend, member.health.rules)

    def follow(self, pool_rules: Mapping[str, HealthRules], prefill: Mapping[str, str]) -> None:
        """Give backends that are added from now on these rules and roles, by their pools."""
        self._pool_rules, self._prefill = pool_rules, prefill

    async def replace(self, backend: Backend, *, within_s: float) -> None:
        """Have `backend` instead of the server of its name, as soon as it has passed a probe, or after REPLACING_S.

        Requests at the old one may end there within `within_s`, while this has returned; then it is closed.
        """
        name = backend.name
        await backend.start()
        is_well = await _passes(backend)
        server, before = self._server(backend, is_cold=False), self._members[name].server
        old = self._ranks(before)
        await self._probes.end(name)
        for rank in old:
            self._forget(rank)
        # what operators want of it is about its name
        server.is_kept_out, server.weight = before.is_kept_out, before.weight
        member = self._members[name] = self._member(backend, server)
        self._listeners.health(name, False)
        if is_well:
            # no request finds the pool without it
            member.probed(None, now=self._clock())
        self._probes.begin(backend, member.health.rules)
        leaving = asyncio.create_task(self._see_off(old, within_s), name=f"end of the old {name}")
        self._replaced.add(leaving)
        leaving.add_done_callback(self._replaced.discard)

    async def joined(self) -> None:
        """Return when every backend has passed a probe, or after REPLACING_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPLACING_S):
                while not all(member.health.was_well for member in self._members.values()):
                    await self.health_changed()

    async def remove(self, name: str, *, within_s: float) -> None:
        """Give the server `name` no new requests, let those there end within `within_s`, then close and forget it.

        Requests that it still has then fail, and are tried elsewhere if their clients have seen nothing. If this is
        cancelled while requests may still end, the backend stays.
        """
        server = self._members[name].server
        self._leave(server, True)
        try:
            await _landed(self._ranks(server), within_s)
        except asyncio.CancelledError:
            self._leave(server, False)
            raise
        # from here on there is no way back: a caller that cancels this still waits for the end
        closing = asyncio.create_task(self._let_go(server), name=f"closing {name}")
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait((closing,))
            raise

    def check(self) -> None:
        """Nothing is at any backend, and there is one probe for each; for an idle router."""
        for name, member in self._members.items():
            assert not member.flights, f"{name} still has {len(member.flights.open)} requests of this router"
            member.check()
        assert not self.on_the_way, f"{len(self.on_the_way)} requests are at backends that were removed"
        servers = {member.server.ranks[0] for member in self._members.values()}
        assert not self._is_open or set(self._probes.names()) == servers, "a server is probed twice, or never"
        ranks = [name for server in {member.server for member in self._members.values()} for name in server.ranks]
        assert sorted(ranks) == sorted(self._members), "a rank is lost, or belongs to nothing"
        assert self.is_large == (len(self._members) > LARGE), "the fleet's size is wrong"
        assert self._serving <= self._members.keys(), "a backend that is gone serves"
        assert self._unnoted.keys() <= self._members.keys(), "a backend that is gone is to be noted"
        assert self._scored.keys() <= self._members.keys(), "a backend that is gone is to be noted"
        assert self._undescribed <= self._members.keys(), "a backend that is gone is to be described"
        assert self.lenders <= self._members.keys(), "a backend that is gone lends"
        assert not len(self.computing), f"{self.computing!r}: no request is at any backend"
        self._shortlist.check()

    @property
    def in_flight(self) -> int:
        """How many requests this router has at backends."""
        return len(self.on_the_way)

    def backend(self, name: str) -> Backend:
        """The backend of this name."""
        return self._members[name].backend

    def names(self) -> Collection[str]:
        """All backends by name."""
        return self._members.keys()

    def reports_cache(self, name: str) -> bool:
        """Does this backend itself tell what its cache holds?"""
        member = self._members.get(name)
        return member is not None and member.reports_cache

    def backend_of(self, flight: Flight) -> Backend:
        """Where `flight`, which has begun, is; removed or not."""
        return self.on_the_way[flight].backend

    def flights(self, name: str) -> int:
        """How many requests this router has at `name`."""
        return len(self._members[name].flights)

    def server_of(self, name: str) -> Server:
        """What the backend `name` shares with the other data-parallel ranks of its server."""
        return self._members[name].server

    def drain(self, name: str, draining: bool = True) -> None:
        """Give the server of `name` no new requests, or, with False, give it some again."""
        server = self._members[name].server
        server.is_kept_out = draining
        self._changed_at(server)

    def weigh(self, name: str, weight: float) -> None:
        """Give each rank of the server of `name` a share of the load like `weight`, beside others' weights of 1."""
        server = self._members[name].server
        server.weight = weight
        self._changed_at(server)

    def changed(self, name: str) -> None:
        """`name` may have got room: `on_changed` is called."""
        if name in self._members:
            self._unnoted[name] = None
            self._undescribed.add(name)
        self.on_changed(name)

    def view(
        self,
        now: float,
        held: Mapping[str, int] | None = None,
        rank: int | None = None,
        prompt_tokens: float = math.inf,
        model: str | None = None,
        among: Sequence[str] | None = None,
    ) -> ClusterView:
        """All backends at `now`. `held` says how much of a prompt's beginning each is believed to hold, in tokens.

        A backend that does not report its cache has None there instead of 0: it is unknown. `rank` and `prompt_tokens`
        are those of the request: what is preemptible for it counts as reclaimable, and worse ranks are not in front of
        it, where backends serve by rank. `model` tells which LoRA adapter has to be ready. `among` names the
        backends of a shortlist: all others are left out.
        """
        held, views = held or {}, []
        members = self._members.values() if among is None else [self._members[name] for name in among]
        for member in members:
            views.append(member.view(now, held, rank, prompt_tokens, model))  # noqa: PERF401 - a comprehension is a call before Python 3.12
        if among is not None:
            self._scored.update(dict.fromkeys(among))
        return ClusterView(tuple(views), now, left_out=len(self._members) - len(views))

    def shortlist(
        self, request: Request, held: Mapping[str, int], avoiding: Collection[str], *, with_full: bool = False
    ) -> Sequence[str] | None:
        """The names of the few backends of a large fleet to score for `request`; None in a small fleet: score all.

        `held` has the tokens of the prompt that backends are believed to hold; `with_full` the full holders as well.
        """
        if not self.is_large:
            return None
        names = self._shortlist.names(request, held, avoiding, self._rng, with_full=with_full)
        if not self._prefill:
            return names
        return [*names, *(name for name, member in self._members.items() if member.role.only_prefills)]

    def may_have_room(self, name: str, model: str, rank: int = 0, tokens: int = 1) -> bool:
        """May `name` have room for a request of `rank` for `model` that computes so many prompt `tokens`?

        Quick, and without the filters of a policy: False only for a backend that is well, serves the model and is full.
        """
        member = self._members.get(name)
        return member is None or member.may_have_room(model, rank, tokens)

    def lend(self, name: str, tokens: int) -> Mapping[str, Any] | None:
        """What the backend that fetches the first `tokens` of a prompt from `name` has to be told; None: it cannot."""
        member = self._members.get(name)
        return None if member is None or member.lender is None else member.lender.lend(tokens)

    def hand_over(self, name: str) -> None:
        """Name to `name`, which is about to stop, the backends that get its KV: those of its pool with most room."""
        leaving = self._members.get(name)
        if leaving is None or not isinstance(leaving.backend, Leaver):
            return
        group, pool = leaving.backend.kv_group, leaving.backend.pool
        others = [
            (member.backend.load().free_tokens or 0, transfer)
            for other, member in self._members.items()
            if other != name and member.lender is not None and member.backend.pool == pool
            if member.lender.kv_group == group and member.healthy and not member.draining
            if (transfer := member.lender.lend(0)) is not None
        ]
        others.sort(key=lambda each: each[0], reverse=True)
        leaving.backend.hand_over([transfer for _, transfer in others[:_MOST_HEIRS]])

    def may_serve(self, name: str, model: str) -> bool:
        """Is `name` there, well, not draining, and does it serve `model`?"""
        return name in self._members and self._members[name].may_serve(model)

    def most_held(self, model: str, held: Mapping[str, int]) -> int:
        """The most tokens in `held` of any backend that is well, not draining and serves `model`; 0 without one."""
        if not held:
            return 0
        name = max(held, key=held.__getitem__)
        if self.may_serve(name, model):
            # the usual case
            return held[name]
        most_first = sorted(held, key=held.__getitem__, reverse=True)
        return next((held[name] for name in most_first if self.may_serve(name, model)), 0)

    def models(self) -> dict[str, ServedModel]:
        """Every model that a reached backend serves, by name."""
        self._describe()
        models = ((name, self._models.find(name)) for name in sorted(self._models.names()))
        return {name: model for name, model in models if model is not None}

    def model(self, name: str) -> ServedModel | None:
        """The model of this name, if a reached backend serves it."""
        if self._undescribed:
            self._describe()
        return self._models.found.get(name) or self._models.find(name)

    def pools_ready(self) -> dict[str, bool]:
        """Pool -> has it a healthy backend that was reached? Pools without any backend are not there."""
        ready: dict[str, bool] = {}
        for member in self._members.values():
            if member.role.only_prefills:
                # answers are possible without it
                continue
            ready[member.backend.pool] = ready.get(member.backend.pool, False) or member.healthy
        return ready

    def serves(self, pool: str, model: str) -> bool:
        """Has `pool` a backend that is well and serves `model`?"""
        return any(member.backend.pool == pool and member.may_serve(model) for member in self._members.values())

    def is_ill(self, name: str) -> bool:
        """Is `name` there, and ill or still on trial?"""
        return name in self._members and not self._members[name].health.is_well

    def ill_s(self, name: str) -> float:
        """For how many seconds `name` has got no requests because of its health; 0 if it does, or is not there."""
        return self._members[name].health.ill_s(self._clock()) if name in self._members else 0.0

    def trouble(self, name: str) -> Trouble | None:
        """Why `name` gets no requests because of its health; None if it may get some, or is not there."""
        return self._members[name].health.trouble(self._clock()) if name in self._members else None

    def served_since(self, name: str, at: float) -> bool:
        """Did a request at `name` end well after `at`?"""
        return name in self._members and self._members[name].health.served_since(at)

    def serves_others(self, name: str, tenant: str) -> bool:
        """Did a request of another tenant than `tenant` end well at `name` of late?"""
        return name in self._members and self._members[name].health.serves_others(tenant, self._clock())

    def acquit(self, failures: Iterable[FailedTry]) -> None:
        """Backends failed by the fault of requests: take back what was counted of that."""
        for failure in failures:
            if failure.backend in self._members:
                self._members[failure.backend].health.acquit(failure.suspect.tenant, failure.suspect.request)

    def answered_elsewhere(self, request: Request, failed: Iterable[str]) -> None:
        """A backend answers `request`, at which those that `failed` have failed before."""
        now = self._clock()
        for name in failed:
            if name in self._members:
                self._members[name].answered_elsewhere(request, now)

    def unreached(self) -> Collection[str]:
        """Backends that never said what they serve."""
        return [name for name, member in self._members.items() if member.backend.describe() is None]

    async def health_changed(self) -> None:
        """Wait until the health of any backend changes, or one is removed."""
        self._health_changed.clear()
        await self._health_changed.wait()

    def begin(
        self,
        name: str,
        request: Request,
        uncached_tokens: int,
        *,
        is_first_try: bool = True,
        fetch: Fetch | None = None,
    ) -> Flight:
        """Count `request` as being at `name` from now on, with a prefill of `uncached_tokens`; `end` must follow.

        Nothing is learnt about speed from one that was tried elsewhere before. `fetch` brings KV from another backend,
        in addition to what is there.
        """
        member = self._members[name]
        flight = member.begin(request, uncached_tokens, now=self._clock(), is_first_try=is_first_try, fetch=fetch)
        if fetch is not None and fetch.backend in self._members:
            self._members[fetch.backend].lends_until = flight.sent_at + fetch.seconds
        self.on_the_way[flight] = member
        if uncached_tokens >= LEAST_TOKENS:
            self.computing.began(flight)
        # known since a moment ago
        cache_tokens = None if member.standing is None else member.standing.load.total_tokens
        self._turnover.computed(flight.new_tokens, cache_tokens=cache_tokens, caches=len(self._members))
        self._unnoted[name] = None
        if self.is_large:
            # the next request is to find it as busy as it is now; later it is noted again, as the others are
            self._note(member)
            self._later(self._note_changed)
        if not member.was_used:
            member.was_used = True
            self._listeners.used(name, member.flights.open.__len__)
        return flight

    def end(self, flight: Flight, failure: BaseException | None = None) -> None:
        """`flight` is over: well, or by `failure`. How it ended tells whether the backend is well, and how fast."""
        member, name = self.on_the_way.pop(flight), flight.backend
        if flight.on_computed is not None:
            self.computing.ended(flight)
        member.end(flight, failure, now=self._clock())
        if self._members.get(name) is member:
            self._unnoted[name] = None
        # what was learnt of a backend that was removed meanwhile is not needed, but the router has room for one more
        self.on_changed(name)

    def _tell_learnt(self, member: Member) -> None:
        """Tell what is known of the speed of `member`, which has just learnt from the end of a request."""
        is_there = self._members.get(member.backend.name) is member
        if is_there and member.tell_learnt(self._listeners):
            # what waits may find room
            self.changed(member.backend.name)

    def late_s(self, flight: Flight, quantile: float) -> float | None:
        """Seconds after its sending within which `flight` has its first token in this share of cases; None: unknown."""
        return self.on_the_way[flight].late_s(flight, quantile)

    @contextmanager
    def flying(self, flight: Flight) -> Iterator[Flight]:
        """`flight`, which has begun, ends when the context is left."""
        try:
            yield flight
        except BaseException as failure:
            self.end(flight, failure)
            raise
        self.end(flight)

    async def probe(self, name: str) -> bool:
        """Ask the server of one backend now whether it is well; may it get requests?"""
        server = self._members[name].server
        member = self._members[server.ranks[0]]
        timeout_s = member.health.rules.probe_timeout_s
        failure: BackendFailed | None = None
        reports = [(rank, rank.backend.load()) for rank in self._ranks(server)]
        if server.silent_since is None:
            server.silent_since = self._clock()
        watch = asyncio.create_task(self._watch(server), name=f"watch of {name}")
        try:
            async with asyncio.timeout(timeout_s):
                await member.backend.probe()
        except TimeoutError:
            failure = BackendFailed(f"no answer to a probe in {timeout_s} s")
        except BackendFailed as error:
            failure = error
        finally:
            watch.cancel()
            for rank in self._ranks(server):
                rank.told = None
        if failure is None:
            server.silent_since = None
            if server.is_suspect:
                server.is_suspect = False
                self._changed_at(server)
        if failure is None and isinstance(member.backend, Ranked):
            self._follow_ranks(server, member.backend.ranks())
        member.probed(failure, now=self._clock())
        self._unnoted.update(dict.fromkeys(server.ranks))
        self._undescribed.update(server.ranks)
        for rank, report in reports:
            if rank.backend.load() != report:
                # a bid that waits for room may have waited for this report
                self.changed(rank.backend.name)
        return member.health.may_serve

    async def _probe_until_well(self, name: str) -> bool:
        """Probe `name`. Is it well, and did the probe pass?"""
        server = self._members[name].server
        return await self.probe(name) and server.silent_since is None

    async def _watch(self, server: Server) -> None:
        """Suspect `server`, which is being probed, once it shows no sign of life for too long."""
        suspect_s = server.health.rules.suspect_s
        assert server.silent_since is not None, "it is not probed"
        quiet_since, ranks = server.silent_since, self._ranks(server)
        while True:
            before = self._clock()
            quiet_since = max(quiet_since, *(member.flights.heard_at for member in ranks))
            if (left_s := quiet_since + suspect_s - before) <= 0:
                break
            await asyncio.sleep(left_s)
            if self._clock() - before > 1.5 * left_s + 0.1:
                # a router that had no CPU itself must not suspect its backends of having none
                quiet_since = self._clock()
            ranks = self._ranks(server)
        if server.health.may_serve and not server.is_suspect:
            _log.warning("%s shows no sign of life for %.1f s", server.ranks[0], suspect_s)
            server.is_suspect = True
            self._changed_at(server)
        for member in ranks:
            for flight in member.flights.movable():
                if flight.give_up is not None and self._is_elsewhere(flight, server):
                    flight.give_up(BackendFailed(f"{flight.backend} shows no sign of life"))

    async def _keep_timeouts(self) -> None:
        while True:
            before = self._clock()
            await asyncio.sleep(LATE_EVERY_S)
            now = self._clock()
            if now - before > 2 * LATE_EVERY_S + 0.1:
                # this router had no CPU itself: what backends sent meanwhile was not read yet
                for flight in self.on_the_way:
                    flight.alive_at = max(flight.alive_at, now)
            self.end_overdue()
            if self.is_large:
                # while no request begins, too
                self._note_changed()

    def end_overdue(self) -> None:
        """Give up the requests with a backend that is late, if another one can take them or the ceiling has passed."""
        now = self._clock()
        for flight, member in tuple(self.on_the_way.items()):
            late, server = None if flight.give_up is None else member.overdue(flight, now), member.server
            if late is None:
                continue
            if not (late.is_beyond_most or self._may_go_elsewhere(flight, server)):
                if flight is server.trial:
                    # it may stay, but others need not wait for what becomes of it
                    server.trial = None
                    self._changed_at(server)
                continue
            assert flight.give_up is not None, "it was looked at a moment ago"
            # a backend that answers others or its probes does not hang as a whole: the request may be the cause
            answers = server.health.probes_failed == 0 and not server.is_suspect
            kind = BackendHung if answers or member.flights.heard_at > flight.alive_at else BackendFailed
            flight.give_up(kind(f"{flight.backend} sent no {late.what} for {rounded_seconds(late.quiet_s)}"))

    def has_other(self, flight: Flight) -> bool:
        """Is there a backend of another server for `flight`, which has begun?"""
        return self._is_elsewhere(flight, self.on_the_way[flight].server)

    def _may_go_elsewhere(self, flight: Flight, server: Server) -> bool:
        """Can `flight` begin anew, at another server or, if it fetches KV, here without that?"""
        return flight.fetches or self._is_elsewhere(flight, server)

    def _is_elsewhere(self, flight: Flight, server: Server) -> bool:
        pools, model = flight.request.pools, flight.request.model
        return any(
            other.server is not server and (pools is None or other.backend.pool in pools) and other.may_serve(model)
            for other in self._members.values()
        )

    def _describe(self) -> None:
        """Ask the backends that changed what they serve."""
        while self._undescribed:
            member = self._members[self._undescribed.pop()]
            if not member.role.only_prefills:
                self._models.note(member.backend)

    def _note_changed(self) -> None:
        """Note the backends that were scored for the shortlist, and some of those that have changed."""
        names, unnoted = list(self._scored), self._unnoted
        self._scored.clear()
        names += [unnoted.popitem(last=False)[0] for _ in range(min(MOST_NOTED, len(unnoted)))]
        for name in names:
            self._note(self._members[name])

    def _note(self, member: Member) -> None:
        """Tell the shortlist what `member` has to do now."""
        if member.role.only_prefills:
            return
        self._shortlist.note(member.known().view, member.server.weight)

    def _server(self, backend: Backend, *, is_cold: bool) -> Server:
        rules = self._pool_rules.get(backend.pool, self._rules)
        return Server(Health(rules, self._rng, is_cold=is_cold))

    def _member(self, backend: Backend, server: Server) -> Member:
        # the caller adds it
        self.is_large = len(self._members) >= LARGE
        server.ranks.append(backend.name)
        self._undescribed.add(backend.name)
        peers = self._peers.setdefault((backend.pool, backend.kind), Peers(prior_of(backend.kind)))
        listeners, prefill = self._listeners, self._prefill.get(backend.pool)
        self.divides |= prefill is not None
        member = Member(
            backend,
            server,
            role=Role(prefill, backend.pool in self._prefill.values()),
            elsewhere=self._elsewhere.get(backend.name, Elsewhere()),
            turnover=self._turnover,
            peers=peers,
            on_predicted=listeners.predicted,
            on_health=self._tell,
            on_learnt=self._tell_learnt,
            later=self._later,
        )
        if member.lender is not None:
            self.lenders.add(backend.name)
        return member

    def _ranks(self, server: Server) -> list[Member]:
        return [self._members[name] for name in server.ranks]

    def _follow_ranks(self, server: Server, others: Sequence[Backend]) -> None:
        """Have the ranks 1, 2, ... of `server` that it tells of, and no others."""
        known = server.ranks[1:]
        for backend in others[len(known) :]:
            assert backend.name not in self._members, f"two backends are called {backend.name}"
            member = self._members[backend.name] = self._member(backend, server)
            member.is_leaving = self._members[server.ranks[0]].is_leaving
            self._note(member)
            self._listeners.health(backend.name, server.health.may_serve)
            if server.health.may_serve:
                self._serving.add(backend.name)
            self.changed(backend.name)
        for name in known[len(others) :]:
            # it was started anew with fewer: what a rank had that is gone is lost
            self._forget(self._members[name])
        if len(others) != len(known):
            _log.info("%s has %d data-parallel ranks", server.ranks[0], len(others) + 1)

    def _tell_computed(self, flight: Flight, is_computed: bool) -> None:
        """Requests that wait for the prompt of `flight` look again: it is computed, or nothing becomes of it."""
        if is_computed:
            self._listeners.computed(flight.backend, flight.request.block_keys)
        self.on_changed(flight.backend)

    def _tell(self, member: Member) -> None:
        """The server of `member` may get requests now, or no longer, or more of them."""
        server, serves = member.server, member.health.may_serve
        if not server.ranks:
            # it was removed
            return
        if serves != (server.ranks[0] in self._serving):
            (self._serving.update if serves else self._serving.difference_update)(server.ranks)
            if not serves and not member.is_leaving:
                _log.warning("%s is ill: %s", server.ranks[0], member.health.reason)
            self._health_changed.set()
            for name in server.ranks:
                self._listeners.health(name, serves)
        self._changed_at(server)

    def _changed_at(self, server: Server) -> None:
        for member in self._ranks(server):
            # rare, and it may decide whether the backend is a candidate at all
            self._note(member)
            self.changed(member.backend.name)

    def _leave(self, server: Server, is_leaving: bool) -> None:
        for member in self._ranks(server):
            member.is_leaving = is_leaving
        self._changed_at(server)

    async def _let_go(self, server: Server) -> None:
        name = server.ranks[0]
        await self._probes.end(name)
        await _close(self._members[name].backend)
        # requests that were cut off there end now, and count against it for the last time
        await _landed(self._ranks(server), CLOSING_S)
        for member in self._ranks(server):
            self._forget(member)

    @staticmethod
    async def _see_off(ranks: Sequence[Member], within_s: float) -> None:
        """Close the server of `ranks`, which was replaced, when its requests have ended, or after `within_s`."""
        try:
            await _landed(ranks, within_s)
        finally:
            await _close(ranks[0].backend)

    def _forget(self, member: Member) -> None:
        name = member.backend.name
        del self._members[name]
        self.is_large = len(self._members) > LARGE
        member.server.ranks.remove(name)
        self._serving.discard(name)
        self._unnoted.pop(name, None)
        self._scored.pop(name, None)
        self._undescribed.discard(name)
        self._models.forget(name)
        self.lenders.discard(name)
        self._shortlist.forget(name)
        self._health_changed.set()
        self._listeners.gone(name)
        self.changed(name)


async def _passes(backend: Backend) -> bool:
    """Whether `backend`, which was started, passes a probe within REPLACING_S."""
    with suppress(TimeoutError):
        async with asyncio.timeout(REPLACING_S):
            while True:
                with suppress(BackendFailed):
                    await backend.probe()
                    return True
                await asyncio.sleep(_PROBE_AGAIN_S)
    _log.warning("%s passes no probe, and takes its place nevertheless", backend.name)
    return False


async def _landed(ranks: Sequence[Member], within_s: float) -> None:
    """Return when nothing is at `ranks` any more, or after `within_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            for member in ranks:
                while member.flights:
                    member.landed.clear()
                    await member.landed.wait()


async def _close(backend: Backend) -> None:
    try:
        async with asyncio.timeout(CLOSING_S):
            await backend.close()
    except Exception:  # noqa: BLE001 - whatever a backend does on its way out, it goes
        _log.exception("%s did not close well", backend.name)
