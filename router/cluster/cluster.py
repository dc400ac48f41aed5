"""All backends: whether they are well, what they have to do, and one immutable view of it for each decision."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from weakref import WeakValueDictionary

from backends.base import Backend
from policies.errors import BackendFailed
from policies.health import Health, HealthRules
from policies.learning.cost import Peers, prior_of
from policies.nouns import ClusterView, Request
from router.cluster.flights import Flight, Traffic
from router.cluster.listener import ClusterListener
from router.cluster.member import Member
from router.cluster.served_model import ServedModel, served_model
from router.supervise import supervise

_log = logging.getLogger("pointsman.cluster")

CLOSING_S = 5.0
"""How long a backend that is removed may take to close, and its last requests to notice."""


class Cluster:
    """Owns the backends and the tasks that probe them. An async context manager.

    `rules` say when a backend is ill; `pool_rules` have others for some pools. Who wants to know what happens listens.
    """

    def __init__(
        self,
        backends: Iterable[Backend] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        rules: HealthRules = HealthRules(),  # noqa: B008 - frozen
        pool_rules: Mapping[str, HealthRules] = MappingProxyType({}),
    ) -> None:
        self._clock, self._rng = clock, rng or random.Random()
        self._rules, self._pool_rules = rules, pool_rules
        self._peers: WeakValueDictionary[tuple[str, str], Peers] = WeakValueDictionary()
        self._members: dict[str, Member] = {}
        self._flying: dict[Flight, Member] = {}
        self._listeners: list[ClusterListener] = []
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._is_open = False
        self._serving: set[str] = set()
        self._health_changed = asyncio.Event()
        self.hold(backends)

    def __repr__(self) -> str:
        states = (f"{name} {'well' if m.healthy else 'ill'} {len(m.flights)}" for name, m in self._members.items())
        return f"<Cluster {', '.join(states)}>"

    def __contains__(self, name: str) -> bool:
        return name in self._members

    async def __aenter__(self) -> Cluster:
        self._is_open = True
        for name, member in self._members.items():
            self._say_health(name, False)
            await member.backend.start()
        for member in self._members.values():
            self._begin_probing(member)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        probes, self._probes = list(self._probes.values()), {}
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for member in self._members.values():
            await member.backend.close()

    def listen(self, listener: ClusterListener) -> None:
        """Let `listener` hear what happens from now on."""
        self._listeners.append(listener)

    def hold(self, backends: Iterable[Backend]) -> None:
        """Have these from the beginning; for a cluster that is not entered yet."""
        assert not self._is_open, "the cluster is open: add them"
        for backend in backends:
            assert backend.name not in self._members, f"two backends are called {backend.name}"
            self._members[backend.name] = self._member(backend, is_cold=False)

    def traffic(self) -> dict[str, Traffic]:
        """What this router has at each backend where it has anything."""
        return {name: member.flights.traffic() for name, member in self._members.items() if member.flights}

    def hear_elsewhere(self, traffic: Mapping[str, Traffic]) -> None:
        """What all other routers have at each backend, as far as they tell."""
        for name, member in self._members.items():
            there = traffic.get(name, Traffic())
            if there != member.elsewhere:
                member.elsewhere = there
                self.changed(name)

    async def add(self, backend: Backend, *, is_cold: bool = True) -> None:
        """Start `backend` and give it requests as soon as a probe passes; slowly at first if it `is_cold`."""
        name = backend.name
        assert self._is_open, "the cluster is not open"
        assert name not in self._members, f"two backends are called {name}"
        member = self._members[name] = self._member(backend, is_cold=is_cold)
        self._say_health(name, False)
        await backend.start()
        self._begin_probing(member)

    async def remove(self, name: str, *, within_s: float) -> None:
        """Give `name` no new requests, let those there end within `within_s`, then close and forget it.

        Requests that it still has then fail, and are tried elsewhere if their clients have seen nothing. If this is
        cancelled while requests may still end, the backend stays.
        """
        member = self._members[name]
        member.is_leaving = True
        # who waits for room there has to look elsewhere
        self.changed(name)
        try:
            await self._landed(member, within_s)
        except asyncio.CancelledError:
            member.is_leaving = False
            self.changed(name)
            raise
        # from here on there is no way back: whoever cancels this waits for the end all the same
        closing = asyncio.create_task(self._let_go(member), name=f"closing {name}")
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait((closing,))
            raise

    def check(self) -> None:
        """Nothing is at any backend, and there is one probe for each; for an idle router."""
        for name, member in self._members.items():
            assert not member.flights, f"{name} still has {len(member.flights)} requests of this router"
            member.check()
        assert not self._flying, f"{len(self._flying)} requests are at backends that were removed"
        assert not self._is_open or self._probes.keys() == self._members.keys(), "a backend is probed twice, or never"
        assert self._serving <= self._members.keys(), "a backend that is gone serves"

    @property
    def in_flight(self) -> int:
        """Requests that this router has at backends."""
        return len(self._flying)

    def backend(self, name: str) -> Backend:
        """The backend of this name."""
        return self._members[name].backend

    def names(self) -> Collection[str]:
        """All backends by name."""
        return self._members.keys()

    def tells_cache(self, name: str) -> bool:
        """Does this backend itself tell what its cache holds?"""
        description = self._members[name].backend.describe() if name in self._members else None
        return description is not None and description.reports_cache

    def backend_of(self, flight: Flight) -> Backend:
        """Where `flight`, which has begun, is; removed or not."""
        return self._flying[flight].backend

    def flights(self, name: str) -> int:
        """How many requests this router has at `name`."""
        return len(self._members[name].flights)

    def drain(self, name: str, draining: bool = True) -> None:
        """Give `name` no new requests, or, with False, give it some again."""
        self._members[name].is_kept_out = draining
        self.changed(name)

    def weigh(self, name: str, weight: float) -> None:
        """Give `name` a share of the load like `weight`, beside others' weights of 1."""
        self._members[name].weight = weight
        self.changed(name)

    def changed(self, name: str) -> None:
        """`name` may have got room: say so to all that listen."""
        for listener in self._listeners:
            listener.changed(name)

    def view(
        self,
        now: float,
        held: Mapping[str, int] | None = None,
        rank: int | None = None,
        prompt_tokens: float = math.inf,
    ) -> ClusterView:
        """All backends at `now`. `held` says how much of a prompt's beginning each is believed to hold, in tokens.

        A backend that does not report its cache has None there instead of 0: nobody knows. `rank` and `prompt_tokens`
        are those of the request: what is preemptible for it counts as reclaimable, and worse ranks are not in front of
        it, where backends serve by rank.
        """
        held = held or {}
        return ClusterView(tuple(member.view(now, held, rank, prompt_tokens) for member in self._members.values()), now)

    def may_serve(self, name: str, model: str) -> bool:
        """Is `name` there, well, not draining, and does it serve `model`?"""
        return name in self._members and self._members[name].may_serve(model)

    def most_held(self, model: str, held: Mapping[str, int]) -> int:
        """The most tokens in `held` of any backend that is well, not draining and serves `model`; 0 without one."""
        members = ((self._members.get(name), tokens) for name, tokens in held.items())
        return max((tokens for member, tokens in members if member is not None and member.may_serve(model)), default=0)

    def models(self) -> dict[str, ServedModel]:
        """Every model that a reached backend serves, by name."""
        reached = (member.backend.describe() for member in self._members.values())
        names = {name for description in reached if description for name in description.models}
        models = ((name, self.model(name)) for name in sorted(names))
        return {name: model for name, model in models if model is not None}

    def model(self, name: str) -> ServedModel | None:
        """The model of this name, if a reached backend serves it."""
        described = ((member.backend, member.backend.describe()) for member in self._members.values())
        serving = [(backend, said) for backend, said in described if said is not None and name in said.models]
        return served_model(name, serving) if serving else None

    def pools_ready(self) -> dict[str, bool]:
        """Pool -> has it a healthy backend that was reached? Pools without any backend are not there."""
        ready: dict[str, bool] = {}
        for member in self._members.values():
            ready[member.backend.pool] = ready.get(member.backend.pool, False) or member.healthy
        return ready

    def is_ill(self, name: str) -> bool:
        """Is `name` there, and ill or still on trial?"""
        return name in self._members and not self._members[name].health.is_well

    def ill_s(self, name: str) -> float:
        """For how many seconds `name` has got no requests because of its health; 0 if it does, or is not there."""
        member = self._members.get(name)
        since = member.health.ill_since if member else None
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def unreached(self) -> Collection[str]:
        """Backends that never said what they serve."""
        return [name for name, member in self._members.items() if member.backend.describe() is None]

    async def health_changed(self) -> None:
        """Wait until the health of any backend changes, or one is removed."""
        self._health_changed.clear()
        await self._health_changed.wait()

    def begin(self, name: str, request: Request, uncached_tokens: int, *, is_first_try: bool = True) -> Flight:
        """Count `request` as being at `name` from now on, with a prefill of `uncached_tokens`; `end` must follow.

        Nothing is learnt about speed from one that was tried elsewhere before.
        """
        member = self._members[name]
        flight = member.begin(request, uncached_tokens, now=self._clock(), is_first_try=is_first_try)
        self._flying[flight] = member
        self._say_in_flight(member)
        return flight

    def end(self, flight: Flight, failure: BaseException | None = None) -> None:
        """`flight` is over: well, or by `failure`. How it ended tells whether the backend is well, and how fast."""
        member, name = self._flying.pop(flight), flight.backend
        member.end(flight, failure, now=self._clock())
        if self._members.get(name) is member:
            self._say_in_flight(member)
            self._say_learnt(member)
        # of one that was removed meanwhile nobody asks what was learnt there, but the router has room for one more
        self.changed(name)

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
        """Ask one backend now whether it is well; may it get requests?"""
        member = self._members[name]
        timeout_s = member.health.rules.probe_timeout_s
        failure: BackendFailed | None = None
        report = member.backend.load()
        try:
            async with asyncio.timeout(timeout_s):
                await member.backend.probe()
        except TimeoutError:
            failure = BackendFailed(f"no answer to a probe in {timeout_s} s")
        except BackendFailed as error:
            failure = error
        member.probed(failure, now=self._clock())
        if member.backend.load() != report:
            # who waits for room may have waited for this report
            self.changed(name)
        return member.health.may_serve

    def _member(self, backend: Backend, *, is_cold: bool) -> Member:
        rules = self._pool_rules.get(backend.pool, self._rules)
        health = Health(rules, self._rng, is_cold=is_cold)
        peers = self._peers.setdefault((backend.pool, backend.kind), Peers(prior_of(backend.kind)))
        return Member(backend, health, peers=peers, on_predicted=self._say_predicted, on_health=self._tell)

    def _begin_probing(self, member: Member) -> None:
        name = member.backend.name
        work = supervise(f"probe of {name}", lambda: self._keep_probing(member))
        self._probes[name] = asyncio.create_task(work, name=f"probe of {name}")

    async def _keep_probing(self, member: Member) -> None:
        rules, reached = member.health.rules, False
        while True:
            await self.probe(member.backend.name)
            if not reached and member.backend.describe() is not None:
                reached = True
                for listener in self._listeners:
                    listener.reached(member.backend)
            await asyncio.sleep(rules.probe_every_s if reached else rules.first_probe_every_s)

    def _tell(self, member: Member) -> None:
        """`member` may get requests now, or no longer, or more of them."""
        name, serves = member.backend.name, member.health.may_serve
        if self._members.get(name) is not member:
            return
        if serves != (name in self._serving):
            if serves:
                self._serving.add(name)
            else:
                self._serving.discard(name)
                if not member.is_leaving:
                    _log.warning("%s is ill: %s", name, member.health.reason)
            self._health_changed.set()
            self._say_health(name, serves)
        self.changed(name)

    def _say_health(self, name: str, healthy: bool) -> None:
        for listener in self._listeners:
            listener.health(name, healthy)

    def _say_in_flight(self, member: Member) -> None:
        for listener in self._listeners:
            listener.in_flight(member.backend.name, len(member.flights))

    def _say_learnt(self, member: Member) -> None:
        learnt = (member.model.snapshot(), member.adaptive_limit)
        if learnt != member.told:
            # ten gauges, and an answer that came whole teaches nothing
            member.told = learnt
            for listener in self._listeners:
                listener.learnt(member.backend.name, *learnt)
        load = member.backend.load()
        if load.drafted_tokens:
            for listener in self._listeners:
                listener.drafted(member.backend.name, load.drafted_tokens, load.accepted_tokens or 0)

    def _say_predicted(self, name: str, predicted_s: float, seen_s: float) -> None:
        for listener in self._listeners:
            listener.predicted(name, predicted_s, seen_s)

    async def _landed(self, member: Member, within_s: float) -> None:
        """Return when nothing is at `member` any more, or after `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while member.flights:
                    member.landed.clear()
                    await member.landed.wait()

    async def _let_go(self, member: Member) -> None:
        name = member.backend.name
        probe = self._probes.pop(name, None)
        if probe is not None:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSING_S):
                await member.backend.close()
        except Exception:  # noqa: BLE001 - whatever a backend does on its way out, it goes
            _log.exception("%s did not close well", name)
        # whoever was cut off there notices now, and counts against it for the last time
        await self._landed(member, CLOSING_S)
        del self._members[name]
        self._serving.discard(name)
        self._health_changed.set()
        for listener in self._listeners:
            listener.gone(name)
        self.changed(name)
