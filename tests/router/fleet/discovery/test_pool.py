"""Sources' addresses become members: joins, drains, reversals, failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from backends.fake import FakeBackend
from policies.errors import ConfigError
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.names import found_name
from router.fleet.discovery.discovery import Discovery
from router.fleet.discovery.pool import Membership, PoolMembers
from router.fleet.discovery.source import Source
from tests.policies.builders import a_request
from tests.router.fleet.discovery.parts import Scripted, virtually
from tests.router.parts import MODEL


@dataclass
class Scene:
    cluster: Cluster
    discovery: Discovery
    make: Callable[[str, str], FakeBackend]
    made: list[FakeBackend] = field(default_factory=list)
    heard: list[tuple[str, str, int]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    async def change(self, **pools: Membership) -> None:
        def none(pool: str, membership: Membership) -> PoolMembers:
            raise AssertionError("no pool is new")

        self.discovery.change(pools, none, self.cluster.joined)
        await a_moment()

    def there(self) -> dict[str, str]:
        now = asyncio.get_running_loop().time()
        return {backend.name: "draining" if backend.draining else "well" for backend in self.cluster.view(now).backends}


@asynccontextmanager
async def a_scene(sources: Mapping[str, Source], *, drain_s: float = 10.0) -> AsyncIterator[Scene]:
    def make(name: str, address: str) -> FakeBackend:
        if address.startswith("wrong"):
            raise ConfigError("no such address")
        scene.made.append(FakeBackend(name, "own", models=frozenset({MODEL})))
        return scene.made[-1]

    rng = random.Random(3)
    cluster = Cluster(clock=asyncio.get_running_loop().time, rng=rng)
    pool = PoolMembers(
        "own",
        Membership(sources, make),
        cluster=cluster,
        drain_s=lambda: drain_s,
        rng=rng,
        on_heard=lambda *what: scene.heard.append(what),
        on_failed=lambda *what: scene.failed.append(what),
    )
    scene = Scene(cluster, Discovery([pool]), make)
    async with cluster, scene.discovery:
        yield scene
        scene.discovery.check()
    assert all(backend.closed.is_set() for backend in scene.made), "a backend was left open"


async def a_moment() -> None:
    await asyncio.sleep(0.01)


A, B, C = (found_name("own", address) for address in ("a:1", "b:1", "c:1"))


def test_a_backend_has_the_name_of_its_pool_and_address_whatever_its_scheme() -> None:
    assert found_name("own", "10.0.0.1:7001") == "own@10.0.0.1:7001"
    assert found_name("lm", "http://10.0.0.1:23333") == "lm@10.0.0.1:23333"


def test_the_addresses_of_several_sources_are_joined() -> None:
    async def run() -> None:
        first, second = Scripted(), Scripted()
        async with a_scene({"dns://one:1": first, "dns://two:1": second}) as scene:
            first.say("a:1", "b:1")
            second.say("b:1", "c:1")
            await a_moment()
            assert scene.there() == {A: "well", B: "well", C: "well"}
            first.say("a:1")
            await a_moment()
            assert scene.there() == {A: "well", B: "well", C: "well"}, "the other one still names it"
            second.say("c:1")
            await a_moment()
            assert scene.there() == {A: "well", C: "well"}
            assert scene.heard[0] == ("own", "dns://one:1", 2)

    virtually(run)


def test_the_first_backends_are_warm_and_later_ones_begin_slowly() -> None:
    async def run() -> None:
        source = Scripted()
        async with a_scene({"s": source}) as scene:
            source.say("a:1")
            await a_moment()
            source.say("a:1", "b:1")
            await a_moment()
            first, second = scene.cluster.view(asyncio.get_running_loop().time()).backends
            assert (first.weight, second.weight) == (1.0, 0.1)

    virtually(run)


def test_a_backend_no_longer_named_drains_and_one_named_again_meanwhile_stays() -> None:
    async def run() -> None:
        source = Scripted()
        async with a_scene({"s": source}) as scene:
            source.say("a:1", "b:1")
            await a_moment()
            flight = scene.cluster.begin(B, a_request(), 1)
            source.say("a:1")
            await a_moment()
            assert scene.there() == {A: "well", B: "draining"}
            source.say("a:1", "b:1")
            await a_moment()
            assert scene.there() == {A: "well", B: "well"}
            source.say("a:1")
            await a_moment()
            scene.cluster.end(flight)
            await a_moment()
            assert scene.there() == {A: "well"}
            assert len(scene.made) == 2
            source.say("a:1", "b:1")
            await a_moment()
            assert scene.there() == {A: "well", B: "well"}
            assert len(scene.made) == 3, "one that was closed is made anew"

    virtually(run)


def test_a_drain_has_an_end() -> None:
    async def run() -> None:
        source = Scripted()
        async with a_scene({"s": source}, drain_s=10.0) as scene:
            source.say("a:1", "b:1")
            await a_moment()
            flight = scene.cluster.begin(B, a_request(), 1)
            source.say("a:1")
            await asyncio.sleep(9.9)
            assert not scene.made[1].closed.is_set()
            await asyncio.sleep(0.2)
            assert scene.made[1].closed.is_set()
            scene.cluster.end(flight)

    virtually(run)


def test_a_failing_source_keeps_its_addresses_and_is_asked_less_and_less_often() -> None:
    async def run() -> None:
        source = Scripted()
        async with a_scene({"s": source}) as scene:
            source.say("a:1")
            await a_moment()
            for _ in range(8):
                source.fail()
            await asyncio.sleep(100.0)
            assert scene.there() == {A: "well"}
            assert scene.failed == [("own", "s")] * 8
            pauses = [after - before for before, after in zip(source.asked_at, source.asked_at[1:], strict=False)]
            steps = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
            assert all(step / 2 <= pause <= step + 0.02 for step, pause in zip(steps, pauses, strict=True)), pauses
            source.say("b:1")
            await a_moment()
            assert scene.there() == {B: "well"}

    virtually(run)


def test_an_empty_answer_empties_the_cluster_only_after_a_while() -> None:
    async def run() -> None:
        source = Scripted(patience_s=30.0)
        async with a_scene({"s": source}) as scene:
            source.say("a:1")
            await a_moment()
            source.say()
            await asyncio.sleep(29.9)
            assert scene.there() == {A: "well"}
            await asyncio.sleep(0.2)
            assert scene.there() == {}, "no source has to report it again"

    virtually(run)


def test_an_address_that_no_backend_can_have_is_left_out() -> None:
    async def run() -> None:
        source = Scripted()
        async with a_scene({"s": source}) as scene:
            source.say("wrong:1", "a:1")
            await a_moment()
            assert scene.there() == {A: "well"}

    virtually(run)


@pytest.mark.parametrize("seed", range(5))
def test_the_cluster_ends_up_with_the_sources_addresses_and_no_task_is_left(seed: int) -> None:
    async def run() -> None:
        rng, sources = random.Random(seed), {"one": Scripted(0.0), "two": Scripted(0.0)}
        named: dict[str, set[str]] = {name: set() for name in sources}
        async with a_scene(sources, drain_s=0.5) as scene:
            flights = []
            for _ in range(150):
                name = rng.choice(list(sources))
                named[name] = {f"{letter}:1" for letter in "abcdef" if rng.random() < 0.5}
                sources[name].say(*named[name])
                if rng.random() < 0.1:
                    sources[name].fail()
                await asyncio.sleep(rng.choice((0.0, 0.05, 0.3)))
                well = [name for name, state in scene.there().items() if state == "well"]
                if well and rng.random() < 0.5:
                    flights.append(scene.cluster.begin(rng.choice(well), a_request(), 1))
                elif flights:
                    scene.cluster.end(flights.pop(rng.randrange(len(flights))))
                scene.discovery.check()
            await asyncio.sleep(60.0)
            for flight in flights:
                scene.cluster.end(flight)
            await asyncio.sleep(20.0)
            assert scene.there().keys() == {found_name("own", place) for place in named["one"] | named["two"]}
            scene.cluster.check()

    virtually(run)


def test_what_a_source_has_named_is_replaced_when_its_pool_changes_and_stays_when_nothing_does() -> None:
    async def run() -> None:
        source = Scripted()
        async with a_scene({"s": source}) as scene:
            source.say("a:1", "b:1")
            await a_moment()
            await scene.change(own=Membership({"s": source}, scene.make))
            assert len(scene.made) == 2
            flight = scene.cluster.begin(A, a_request(), 1)
            await scene.change(own=Membership({"s": source}, scene.make, version=2))
            assert scene.there() == {A: "well", B: "well"}
            assert len(scene.made) == 4
            assert [backend.closed.is_set() for backend in scene.made].count(True) == 1, "requests end at the old one"
            scene.cluster.end(flight)
            await a_moment()
            assert [backend.closed.is_set() for backend in scene.made].count(True) == 2

    virtually(run)


def test_the_backends_of_a_source_that_is_not_named_any_more_leave() -> None:
    async def run() -> None:
        first, second = Scripted(), Scripted()
        async with a_scene({"one": first, "two": second}) as scene:
            first.say("a:1", "b:1")
            second.say("b:1", "c:1")
            await a_moment()
            await scene.change(own=Membership({"two": second}, scene.make))
            assert scene.there() == {B: "well", C: "well"}
            second.say("c:1")
            await a_moment()
            assert scene.there() == {C: "well"}
            await scene.change()
            assert scene.there() == {}
            await scene.change()
            assert repr(scene.discovery) == "<Discovery of none>"

    virtually(run)


def test_a_pool_that_is_gone_and_comes_back_differently_while_it_drains_gets_other_backends() -> None:
    async def run() -> None:
        source = Scripted()
        async with a_scene({"s": source}) as scene:
            source.say("a:1")
            await a_moment()
            flight = scene.cluster.begin(A, a_request(), 1)
            await scene.change()
            assert scene.there() == {A: "draining"}
            await scene.change(own=Membership({"s": source}, scene.make, version=2))
            source.say("a:1")
            await a_moment()
            assert scene.there() == {A: "well"}
            assert len(scene.made) == 2
            scene.cluster.end(flight)
            await a_moment()

    virtually(run)
