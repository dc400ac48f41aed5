"""All backends: whether they are well, what they have to do, and one immutable view of it for each decision."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from backends.base import Backend, Description
from policies.cost import Latency
from policies.errors import BackendFailed
from policies.nouns import ClusterView, Request
from router.flights import Flight
from router.member import Member
from router.supervise import supervise

_log = logging.getLogger("pointsman.cluster")


def backend_name(pool: str, number: int) -> str:
    """The name of a pool's backend, as decisions and metrics show it; the first has number 0."""
    return f"{pool}-{number}"


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a backend counts as ill: after `failures` in a row, of requests or probes, until a probe passes."""

    failures: int = 3
    probe_every_s: float = 2.0
    probe_timeout_s: float = 5.0
    first_probe_every_s: float = 0.1
    """While it was never reached, so that a router is ready as soon as its backends are."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as clients see it. `context_tokens` is the longest of its backends; None if none tells."""

    name: str
    pools: frozenset[str]
    backends: int
    context_tokens: int | None
    vocabulary: int | None
    speaks_tokens: bool
    """At least one of its backends takes token ids."""
    assets: Mapping[str, bytes] = field(repr=False)


class Cluster:
    """Owns the backends and the tasks that probe them. An async context manager.

    Called by backend: `on_health` with a change of health, `on_in_flight` with a count of requests, `on_predicted` with
    the seconds to a first token as predicted and as seen, `on_learnt` with what is known of its latency and its
    adaptive limit, if it needs one.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        clock: Callable[[], float] = time.monotonic,
        rules: HealthRules = HealthRules(),
        on_health: Callable[[str, bool], None] = lambda *_: None,
        on_in_flight: Callable[[str, int], None] = lambda *_: None,
        on_predicted: Callable[[str, float, float], None] = lambda *_: None,
        on_learnt: Callable[[str, Latency, int | None], None] = lambda *_: None,
    ) -> None:
        self._members = {backend.name: Member(backend, on_predicted=on_predicted) for backend in backends}
        assert len(self._members) == len(backends), "two backends have one name"
        self._clock, self._rules = clock, rules
        self._on_health, self._on_in_flight, self._on_learnt = on_health, on_in_flight, on_learnt
        self.in_flight = 0
        self._heeders: list[Callable[[str], None]] = []
        self._probes: list[asyncio.Task[None]] = []
        self._health_changed = asyncio.Event()

    def __repr__(self) -> str:
        states = (f"{name} {'well' if m.healthy else 'ill'} {len(m.flights)}" for name, m in self._members.items())
        return f"<Cluster {', '.join(states)}>"

    async def __aenter__(self) -> Cluster:
        for name, member in self._members.items():
            self._on_health(name, member.well)
            await member.backend.start()
        self._probes = [
            asyncio.create_task(supervise(f"probe of {name}", lambda m=member: self._keep_probing(m)))  # type: ignore[misc]
            for name, member in self._members.items()
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        self._probes = []
        for member in self._members.values():
            await member.backend.close()

    def check(self) -> None:
        """Nothing is at any backend; for an idle router."""
        for name, member in self._members.items():
            assert not member.flights, f"{name} still has {len(member.flights)} requests of this router"
            member.check()

    def backend(self, name: str) -> Backend:
        """The backend of this name."""
        return self._members[name].backend

    def flights(self, name: str) -> int:
        """How many requests this router has at `name`."""
        return len(self._members[name].flights)

    def drain(self, name: str, draining: bool = True) -> None:
        """Give `name` no new requests, or, with False, give it some again."""
        self._members[name].draining = draining
        self.changed(name)

    def weigh(self, name: str, weight: float) -> None:
        """Give `name` a share of the load like `weight`, beside others' weights of 1."""
        self._members[name].weight = weight
        self.changed(name)

    def heed(self, heeder: Callable[[str], None]) -> None:
        """Call `heeder` with a backend's name whenever that may have got room.

        When a request there has ended, when it reported its load (our shards do in each step), when its health or
        its drain changed. What it does must be cheap.
        """
        self._heeders.append(heeder)

    def changed(self, name: str) -> None:
        """`name` may have got room: say so to all that heed it."""
        for heeder in self._heeders:
            heeder(name)

    def view(self, now: float, held: Mapping[str, int] | None = None, rank: int | None = None) -> ClusterView:
        """All backends at `now`. `held` says how much of a prompt's beginning each is believed to hold, in tokens.

        A backend that does not report its cache has None there instead of 0: nobody knows. `rank` is that of the
        request: what is preemptible for it counts as reclaimable, and worse ranks are not in front of it, where
        backends serve by rank.
        """
        held = held or {}
        return ClusterView(tuple(member.view(now, held, rank) for member in self._members.values()), now)

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
        described = ((member, member.backend.describe()) for member in self._members.values())
        serving = [(member, said) for member, said in described if said is not None and name in said.models]
        return _served(name, serving) if serving else None

    def pools_ready(self) -> dict[str, bool]:
        """Pool -> has it a healthy backend that was reached?"""
        ready: dict[str, bool] = {}
        for member in self._members.values():
            ready[member.backend.pool] = ready.get(member.backend.pool, False) or member.healthy
        return ready

    def unreached(self) -> Collection[str]:
        """Backends that never said what they serve."""
        return [name for name, member in self._members.items() if member.backend.describe() is None]

    async def health_changed(self) -> None:
        """Wait until the health of any backend changes."""
        self._health_changed.clear()
        await self._health_changed.wait()

    def begin(self, name: str, request: Request, uncached_tokens: int, *, is_first_try: bool = True) -> Flight:
        """Count `request` as being at `name` from now on, with a prefill of `uncached_tokens`; `end` must follow.

        Nothing is learnt about speed from one that was tried elsewhere before.
        """
        member = self._members[name]
        flight = member.begin(request, uncached_tokens, now=self._clock(), is_first_try=is_first_try)
        self.in_flight += 1
        self._on_in_flight(name, len(member.flights))
        return flight

    def end(self, flight: Flight, failure: BaseException | None = None) -> None:
        """`flight` is over: well, or by `failure`. How it ended tells whether the backend is well, and how fast."""
        name = flight.backend
        member = self._members[name]
        member.end(flight, failure, now=self._clock())
        if failure is None:
            member.failures = 0
        elif isinstance(failure, BackendFailed):
            self._failed(member, failure)
        self.in_flight -= 1
        self._on_in_flight(name, len(member.flights))
        self._on_learnt(name, member.model.snapshot(), member.adaptive_limit)
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
        """Ask one backend now whether it is well."""
        member = self._members[name]
        try:
            async with asyncio.timeout(self._rules.probe_timeout_s):
                await member.backend.probe()
        except TimeoutError:
            self._failed(member, BackendFailed(f"no answer to a probe in {self._rules.probe_timeout_s} s"))
        except BackendFailed as failure:
            self._failed(member, failure)
        else:
            member.failures = 0
            self._set_well(member, True)
        return member.well

    async def _keep_probing(self, member: Member) -> None:
        rules = self._rules
        while True:
            await self.probe(member.backend.name)
            reached = member.backend.describe() is not None
            await asyncio.sleep(rules.probe_every_s if reached else rules.first_probe_every_s)

    def _failed(self, member: Member, failure: BackendFailed) -> None:
        member.failures += 1
        if member.well and member.failures >= self._rules.failures:
            _log.warning("%s is ill after %d failures: %s", member.backend.name, member.failures, failure)
            self._set_well(member, False)

    def _set_well(self, member: Member, well: bool) -> None:
        if member.well != well:
            member.well = well
            self._health_changed.set()
            self._on_health(member.backend.name, well)
            self.changed(member.backend.name)


def _served(name: str, members: Sequence[tuple[Member, Description]]) -> ServedModel:
    contexts = [description.context_tokens for _, description in members if description.context_tokens is not None]
    sizes = [description.vocabulary for _, description in members if description.vocabulary is not None]
    assets = (member.backend.assets() for member, description in members if description.speaks_tokens)
    return ServedModel(
        name=name,
        pools=frozenset(member.backend.pool for member, _ in members),
        backends=len(members),
        context_tokens=max(contexts, default=None),
        vocabulary=min(sizes, default=None),
        speaks_tokens=any(description.speaks_tokens for _, description in members),
        assets=next((files for files in assets if "tokenizer.json" in files), {}),
    )
