"""Prefixes over fake backends: a warmer that takes the first backend it may, and a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from backends.fake import FakeBackend
from policies.errors import ExpectedError, NoBackend
from policies.health import HealthRules
from policies.nouns import Tenant
from policies.prefix.index import PrefixIndex
from router.ask import Ask
from router.fleet.cluster.cluster import Cluster
from router.shared.prefixes.prefix import PrefixNews
from router.shared.prefixes.prefixes import Prefixes
from router.shared.prefixes.rules import PrefixRules
from router.shared.prefixes.warmer import Measure, Warmed

KEYS = tuple(range(1, 11))
TOKENS = 64 * len(KEYS)
RULES = PrefixRules(every_s=3600.0, patience_s=10.0, first_backoff_s=5.0, most_backoff_s=20.0)
ACME = Tenant("acme", domain="acme", pinned_tokens=4 * TOKENS)
LABS = Tenant("labs", domain="labs")


def an_ask(text: str = "a document") -> Ask:
    return Ask(model="fake", inputs=(text,), bodies=({},), path="/v1/completions")


@dataclass
class FirstWarmer:
    """Computes at the first backend, by name, that is well and not to be avoided. `prompts` has the keys of texts.

    `gate` holds what computes up while it is closed, `evicts` so many blocks go before they can be pinned, once each.
    """

    cluster: Cluster
    index: PrefixIndex
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    failure: ExpectedError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    evicts: list[int] = field(default_factory=list)
    warmed: list[tuple[str, str]] = field(default_factory=list)
    computing: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def measure(self, ask: Ask, tenant: Tenant) -> Measure:
        keys = self._keys(ask)
        return Measure(ask.model, keys, 64 * len(keys))

    async def warm(self, ask: Ask, tenant: str, *, avoiding: frozenset[str], placed: Callable[[str], None]) -> Warmed:
        if self.failure is not None:
            raise self.failure
        free = [name for name in sorted(self.cluster.names()) if name not in avoiding]
        name = next((name for name in free if self.cluster.may_serve(name, ask.model)), None)
        if name is None:
            raise NoBackend("none is left")
        placed(name)
        self.computing += 1
        await self.gate.wait()
        self.computing -= 1
        self.warmed.append((tenant, name))
        keys = self._keys(ask)
        backend = self.cluster.backend(name)
        assert isinstance(backend, FakeBackend)
        there = keys[: len(keys) - self.evicts.pop(0)] if self.evicts else keys
        backend.cache.update(dict.fromkeys(there, tenant))
        if backend.pins:
            self.index.store(name, there)
        return Warmed(name, backend.pool)

    def _keys(self, ask: Ask) -> tuple[int, ...]:
        (text,) = ask.inputs
        return self.prompts.get(str(text), KEYS)


@dataclass
class Bench:
    backends: dict[str, FakeBackend]
    cluster: Cluster
    warmer: FirstWarmer
    prefixes: Prefixes
    index: PrefixIndex
    clock: list[float]
    shared: list[PrefixNews]

    @property
    def now(self) -> float:
        return self.clock[0]

    def pass_s(self, seconds: float) -> None:
        self.clock[0] += seconds

    async def keep(self, text: str = "a document", tenant: Tenant = ACME, **more: Any) -> Any:
        return await self.prefixes.keep(an_ask(text), tenant, **{"shards": 1, "ttl_s": 600.0, **more})

    async def turn(self) -> None:
        """One look at all prefixes, and whatever it began to mend."""
        await self.prefixes.turn()
        while tasks := [charge.task for charge in self.prefixes._charges.values() if charge.task is not None]:
            await asyncio.wait(tasks)

    async def fall_ill(self, name: str) -> None:
        """Backend `name` was restarted and is away: it has lost all that it had."""
        backend = self.backends[name]
        backend.is_well = False
        backend.cache.clear()
        backend.pinned.clear()
        while await self.cluster.probe(name):
            pass

    async def come_back(self, name: str) -> None:
        """It is there again; the listener hears that it holds nothing."""
        self.backends[name].is_well = True
        self.index.clear(name)
        while not await self.cluster.probe(name):
            self.pass_s(1.0)


@asynccontextmanager
async def a_bench(*backends: FakeBackend, by: str = "r1", **rules: Any) -> AsyncIterator[Bench]:
    made = backends or tuple(FakeBackend(f"b{number}", pins=True) for number in range(3))
    clock = [1000.0]
    cluster = Cluster(made, clock=lambda: clock[0], rules=HealthRules(probe_every_s=3600.0))
    index, shared = PrefixIndex(), list[PrefixNews]()
    async with cluster:
        for backend in made:
            await cluster.probe(backend.name)
        warmer = FirstWarmer(cluster, index)
        prefixes = Prefixes(cluster, index, warmer, by=by, now=lambda: clock[0], rules=replace(RULES, **rules))
        prefixes.share(shared.append)
        async with prefixes:
            yield Bench({shard.name: shard for shard in made}, cluster, warmer, prefixes, index, clock, shared)
            prefixes.check()
