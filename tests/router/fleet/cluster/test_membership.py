"""Backends come and go while requests run: none is lost before its first token, nothing is left of removed ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.fake import Answer, FakeBackend
from policies.errors import BackendFailed
from policies.health import HealthRules
from policies.nouns import Decision, Delta
from router.call.caller import Placement
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight
from router.protocols.openai.request import chat_ask
from router.start.build import build
from tests.policies.builders import a_request
from tests.router.parts import KEY, MODEL, Heard, a_chat, a_config
from tests.virtual_time import run_virtually

RULES = HealthRules(failures=2, probe_every_s=0.5, retry_s=0.2, slow_start_s=2.0)


@dataclass(slots=True)
class Mortal(FakeBackend):
    """A fake that can die with all that runs on it, and come back."""

    died: asyncio.Event = field(default_factory=asyncio.Event)

    def die(self) -> None:
        self.is_well = False
        self.died.set()

    def revive(self) -> None:
        self.is_well = True
        self.died = asyncio.Event()


def a_mortal(name: str, *, delay_s: float = 0.05, texts: int = 4) -> Mortal:
    async def sleep(seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await backend.died.wait()
        except TimeoutError:
            return
        raise BackendFailed(f"{name} died")

    answer = Answer(tuple("abcdefgh"[:texts]), delay_s=delay_s)
    backend = Mortal(name, "own", script=answer, models=frozenset({MODEL}), sleep=sleep)
    return backend


async def asleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def reached(cluster: Cluster, *names: str) -> None:
    while not all(cluster.view(0.0).backends[at].healthy for at, _ in enumerate(names)):
        await cluster.health_changed()


def virtually(test: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> None:
        await test()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"

    return run_virtually(run())


def a_cluster(*backends: Any, heard: Heard | None = None) -> Cluster:
    clock = asyncio.get_running_loop().time
    cluster = Cluster(backends, clock=clock, rng=random.Random(1), rules=RULES)
    if heard is not None:
        cluster.listen(heard)
    return cluster


def test_a_backend_that_joins_is_started_probed_and_begins_slowly() -> None:
    async def run() -> None:
        reported: list[tuple[str, bool]] = []
        async with a_cluster(a_mortal("b0"), heard=Heard(health=lambda *what: reported.append(what))) as cluster:
            joiner = a_mortal("b1")
            await cluster.add(joiner)
            assert joiner.is_started
            await reached(cluster, "b0", "b1")
            first, second = cluster.view(asyncio.get_running_loop().time()).backends
            assert (first.weight, second.weight) == (1.0, 0.1)
            assert reported == [("b0", False), ("b1", False), ("b0", True), ("b1", True)]
            cluster.check()
        assert joiner.closed.is_set()

    virtually(run)


def test_a_removed_backend_gets_no_new_requests_and_ends_its_running_ones() -> None:
    async def run() -> None:
        gone: list[str] = []
        async with a_cluster(a_mortal("b0"), a_mortal("b1"), heard=Heard(gone=gone.append)) as cluster:
            await reached(cluster, "b0", "b1")
            flight = cluster.begin("b1", a_request(), 1)
            removal = asyncio.create_task(cluster.remove("b1", within_s=10.0))
            await asyncio.sleep(1.0)
            assert cluster.view(0.0).backends[1].draining
            assert not cluster.backend("b1").closed.is_set()  # type: ignore[attr-defined]
            closed = cluster.backend("b1").closed  # type: ignore[attr-defined]
            cluster.end(flight)
            await removal
            assert closed.is_set()
            assert [backend.name for backend in cluster.view(0.0).backends] == ["b0"]
            assert gone == ["b1"]
            assert "b1" not in cluster
            cluster.check()

    virtually(run)


def test_a_removed_backend_is_closed_after_its_time_and_its_requests_fail() -> None:
    async def run() -> None:
        counts: list[object] = []
        changed: list[str] = []
        heard = Heard(used=lambda *what: counts.append(what))
        async with a_cluster(a_mortal("b0"), heard=heard) as cluster:
            cluster.on_changed = changed.append
            await reached(cluster, "b0")
            flight = cluster.begin("b0", a_request(), 1)
            before = asyncio.get_running_loop().time()
            await cluster.remove("b0", within_s=3.0)
            # the flight did not end although the backend is closed: a client that does not read holds it
            assert 3.0 <= asyncio.get_running_loop().time() - before <= 9.0
            counts.clear(), changed.clear()
            assert cluster.backend_of(flight).name == "b0"
            cluster.end(flight, BackendFailed("closed"))
            assert not counts, "no series comes back for a removed backend"
            assert changed, "the router has room for one more, and a backend may wait for that"
            cluster.check()

    virtually(run)


def test_a_removal_that_is_cancelled_in_time_keeps_the_backend() -> None:
    async def run() -> None:
        async with a_cluster(a_mortal("b0")) as cluster:
            await reached(cluster, "b0")
            flight = cluster.begin("b0", a_request(), 1)
            removal = asyncio.create_task(cluster.remove("b0", within_s=10.0))
            await asyncio.sleep(1.0)
            removal.cancel()
            with pytest.raises(asyncio.CancelledError):
                await removal
            assert not cluster.view(0.0).backends[0].draining
            cluster.end(flight)
            cluster.check()

    virtually(run)


def test_a_backend_that_does_not_close_is_let_go_all_the_same() -> None:
    class Stuck(Mortal):
        async def close(self) -> None:
            await asyncio.Event().wait()

    async def run() -> None:
        async with a_cluster(a_mortal("b0")) as cluster:
            await cluster.add(Stuck("b1", "own", models=frozenset({MODEL})))
            await cluster.remove("b1", within_s=0.0)
            assert [backend.name for backend in cluster.view(0.0).backends] == ["b0"]
            cluster.check()

    virtually(run)


class Asker:
    """One caller. Remembers what it heard."""

    def __init__(self, number: int) -> None:
        self.id, self.key = f"r{number}", KEY
        self.trace: Mapping[str, str] = {}
        self.heard: list[str] = []

    async def read(self, held: object) -> Any:
        return chat_ask(a_chat(f"question {self.id}"))

    def limited(self, standing: Any) -> None:
        pass

    def explain(self, index: int, explanation: Any) -> None:
        pass

    def place(self, index: int, placement: Placement) -> None:
        pass

    async def write(self, index: int, delta: Delta) -> None:
        self.heard.append(delta.text)

    def has_seen(self, index: int) -> bool:
        return any(self.heard)


@dataclass
class Storm:
    """Joins, leaves, deaths and revivals, some hundred of them, while requests go on."""

    gateway: Gateway
    rng: random.Random
    mortals: dict[str, Mortal]
    removals: list[asyncio.Task[None]] = field(default_factory=list)
    born: int = 0
    events: int = 0

    async def blow(self, events: int) -> None:
        for _ in range(events):
            await asyncio.sleep(self.rng.uniform(0.01, 0.15))
            await self.rng.choice((self.join, self.leave, self.kill, self.revive))()
            self.events += 1
        await asyncio.gather(*self.removals)

    def alive(self) -> list[str]:
        return [name for name, mortal in self.mortals.items() if mortal.is_well]

    async def join(self) -> None:
        if len(self.mortals) < 16:
            name, self.born = f"b{self.born}", self.born + 1
            self.mortals[name] = a_mortal(name)
            await self.gateway.cluster.add(self.mortals[name])

    async def leave(self) -> None:
        if len(self.alive()) > 5:
            name = self.rng.choice(list(self.mortals))
            del self.mortals[name]
            within_s = self.rng.choice((0.0, 0.1, 5.0))
            self.removals.append(asyncio.create_task(self.gateway.cluster.remove(name, within_s=within_s)))

    async def kill(self) -> None:
        if len(alive := self.alive()) > 5:
            self.mortals[self.rng.choice(alive)].die()

    async def revive(self) -> None:
        if dead := [name for name, mortal in self.mortals.items() if not mortal.is_well]:
            self.mortals[self.rng.choice(dead)].revive()


@pytest.mark.parametrize("seed", range(4))
def test_joins_leaves_and_deaths_lose_no_request_that_had_not_streamed(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        mortals = {f"b{number}": a_mortal(f"b{number}") for number in range(10)}
        gateway = build(
            a_config(), backends=lambda _: list(mortals.values()), rng=rng, clock=asyncio.get_running_loop().time,
            health=RULES,
        ).gateway  # fmt: skip
        async with gateway.cluster:
            await reached(gateway.cluster, *mortals)
            storm = Storm(gateway, rng, mortals, born=10)
            blowing = asyncio.create_task(storm.blow(120))
            askers: list[Asker] = []
            calls: list[asyncio.Task[None]] = []
            while not blowing.done():
                askers.append(Asker(len(askers)))
                calls.append(asyncio.create_task(serve(askers[-1], gateway)))
                await asyncio.sleep(rng.uniform(0.0, 0.03))
            ends = await asyncio.gather(*calls, return_exceptions=True)
            lost = [error for asker, error in zip(askers, ends, strict=True) if error and not any(asker.heard)]
            assert not lost, f"{len(lost)} of {len(askers)} lost, the first by {lost[0]!r}"
            whole = [asker for asker, error in zip(askers, ends, strict=True) if error is None]
            assert all("".join(asker.heard) == "abcd" for asker in whole), "an answer has pieces of two"
            assert len(whole) > len(askers) / 2
            assert blowing.exception() is None
            assert storm.events == 120
            gateway.check()
            assert {backend.name for backend in gateway.cluster.view(0.0).backends} == set(storm.mortals)
            metrics = gateway.observer.exposition()[0].decode()
            series = {line.split('backend="')[1].split('"')[0] for line in metrics.splitlines() if 'backend="' in line}
            assert series <= {*storm.mortals, "none"}, "series of backends that are gone are left"

    virtually(run)


def test_many_that_die_at_once_cost_a_request_no_try_where_it_never_arrived() -> None:
    async def run() -> None:
        mortals = [a_mortal(f"b{number}") for number in range(9)]
        gateway = build(a_config(), backends=lambda _: mortals, health=HealthRules(probe_every_s=60.0)).gateway
        async with gateway.cluster:
            await reached(gateway.cluster, *(mortal.name for mortal in mortals))
            for later in mortals[1:]:
                later.die()
            asker = Asker(0)
            await serve(asker, gateway)
            assert "".join(asker.heard) == "abcd"
            gateway.check()

    virtually(run)


def test_what_a_series_counts_goes_on_after_another_backend_is_forgotten() -> None:
    async def run() -> None:
        gateway = build(a_config(), backends=lambda _: [a_mortal("b0"), a_mortal("b1")], health=RULES).gateway
        async with gateway.cluster:
            await reached(gateway.cluster, "b0", "b1")
            await gateway.cluster.remove("b1", within_s=0.0)
            flight: Flight = gateway.cluster.begin("b0", a_request(), 1)
            assert b'pointsman_backend_in_flight{backend="b0"} 1.0' in gateway.observer.exposition()[0]
            gateway.cluster.end(flight)
            assert b"b1" not in gateway.observer.exposition()[0]

    virtually(run)


def test_what_was_told_of_a_backend_and_not_counted_yet_is_forgotten_with_it() -> None:
    async def run() -> None:
        gateway = build(a_config(), backends=lambda _: [a_mortal("b0"), a_mortal("b1")], health=RULES).gateway
        async with gateway.cluster:
            await reached(gateway.cluster, "b0", "b1")
            gateway.observer.decided(a_request(), Decision("b1", "own"), None, config_version="")
            gateway.cluster.end(gateway.cluster.begin("b1", a_request(), 1))
            await gateway.cluster.remove("b1", within_s=0.0)
            await asyncio.sleep(1.0)
            assert b"b1" not in gateway.observer.exposition()[0]

    virtually(run)
