"""Data-parallel ranks of one server: backends of their own that share health, draining and weight."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.base import Backend, Load, rank_name
from backends.fake import FakeBackend
from policies.errors import BackendFailed
from policies.health import HealthRules
from policies.nouns import BackendView
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight
from tests.policies.builders import a_request
from tests.router.parts import MODEL, Heard
from tests.virtual_time import run_virtually


@dataclass
class RankedBackend(FakeBackend):
    """A server with so many ranks: rank 0, and the others behind it. A probe takes what is in `reports` of them."""

    count: int = 1
    others: list[FakeBackend] = field(default_factory=list)
    reports: dict[int, Load] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def ranks(self) -> Sequence[Backend]:
        while len(self.others) < self.count - 1:
            name = rank_name(self.name, len(self.others) + 1)
            self.others.append(FakeBackend(name, self.pool, models=self.models))
        return self.others[: self.count - 1]

    async def probe(self) -> None:
        await super().probe()
        for rank, report in self.reports.items():
            self.others[rank - 1].reported = report

    async def close(self) -> None:
        self.left.append(self.name)
        await super().close()


def a_server(name: str = "b0", count: int = 3) -> RankedBackend:
    return RankedBackend(name, "own", models=frozenset({MODEL}), count=count)


@dataclass
class Stage:
    """A cluster of one server, on a clock that the test moves."""

    server: RankedBackend
    now: float = 100.0
    heard: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rules = HealthRules(failures=2, slow_start_s=0.0)
        self.cluster = Cluster([self.server], clock=lambda: self.now, rng=random.Random(1), rules=rules)
        self.cluster.listen(
            Heard(
                health=lambda *what: self.heard.append(("health", *what)),
                gone=lambda name: self.heard.append(("gone", name)),
                reached=lambda backend: self.heard.append(("reached", backend.name)),
            )
        )

    def views(self) -> dict[str, BackendView]:
        return {view.name: view for view in self.cluster.view(self.now).backends}

    def begin(self, name: str) -> Flight:
        return self.cluster.begin(name, a_request(prompt_tokens=10), 10)

    def fail(self, name: str) -> None:
        self.cluster.end(self.begin(name), BackendFailed("x"))


async def test_reported_ranks_become_backends_with_a_load_of_their_own() -> None:
    stage = Stage(a_server())
    assert list(stage.views()) == ["b0"]
    assert await stage.cluster.probe("b0")
    assert list(stage.views()) == ["b0", "b0/1", "b0/2"]
    assert all(view.healthy for view in stage.views().values())
    stage.begin("b0/1")
    assert [view.running + view.waiting for view in stage.views().values()] == [0, 1, 0]
    assert stage.cluster.backend("b0/1") is stage.server.others[0]
    assert stage.cluster.server_of("b0/2").ranks == ["b0", "b0/1", "b0/2"]


async def test_a_restarted_server_has_as_many_ranks_as_it_reports_now() -> None:
    stage = Stage(a_server())
    await stage.cluster.probe("b0")
    lost = stage.begin("b0/2")
    stage.server.count = 2
    await stage.cluster.probe("b0")
    assert list(stage.views()) == ["b0", "b0/1"]
    assert ("gone", "b0/2") in stage.heard
    stage.cluster.end(lost, BackendFailed("it was started anew"))
    stage.server.count = 4
    await stage.cluster.probe("b0")
    assert list(stage.views()) == ["b0", "b0/1", "b0/2", "b0/3"]
    stage.cluster.check()


async def test_one_ill_server_means_that_all_its_ranks_are_ill_whichever_failed() -> None:
    stage = Stage(a_server())
    await stage.cluster.probe("b0")
    stage.heard.clear()
    for name in ("b0/1", "b0/2"):
        stage.fail(name)
    assert not any(view.healthy for view in stage.views().values())
    assert stage.heard == [("health", name, False) for name in ("b0", "b0/1", "b0/2")]
    assert {stage.cluster.ill_s(name) for name in stage.cluster.names()} == {0.0}
    assert all(stage.cluster.is_ill(name) for name in stage.cluster.names())


async def test_on_trial_one_request_is_sent_to_the_server_at_whichever_rank() -> None:
    stage = Stage(a_server())
    await stage.cluster.probe("b0")
    stage.fail("b0")
    stage.fail("b0")
    stage.now += 5.0
    await stage.cluster.probe("b0")
    assert [view.may_take for view in stage.views().values()] == [1, 1, 1]
    trial = stage.begin("b0/2")
    assert [view.may_take for view in stage.views().values()] == [0, 0, 0]
    stage.cluster.end(trial)
    assert [view.may_take for view in stage.views().values()] == [None, None, None]
    stage.cluster.check()


@pytest.mark.parametrize("named", ["b0", "b0/1"])
async def test_ranks_are_drained_and_weighed_together_whichever_is_named(named: str) -> None:
    stage = Stage(a_server())
    await stage.cluster.probe("b0")
    stage.cluster.drain(named)
    stage.cluster.weigh(named, 0.5)
    assert {(view.draining, view.weight) for view in stage.views().values()} == {(True, 0.5)}
    stage.server.count = 4
    await stage.cluster.probe("b0")
    assert stage.views()["b0/3"].draining, "so is a rank that is new"
    stage.cluster.drain(named, False)
    assert not any(view.draining for view in stage.views().values())


async def test_a_new_load_of_one_rank_is_reported_for_that_rank() -> None:
    stage, changed = Stage(a_server()), list[str]()
    await stage.cluster.probe("b0")
    stage.cluster.on_changed = changed.append
    await stage.cluster.probe("b0")
    assert changed == []
    stage.server.reports = {2: Load(running=1)}
    await stage.cluster.probe("b0")
    assert changed == ["b0/2"]


def test_a_server_is_probed_once_and_leaves_with_all_its_ranks() -> None:
    async def run() -> None:
        server = a_server()
        heard: list[str] = []
        reached: list[str] = []
        async with Cluster(
            [server], rules=HealthRules(probe_every_s=0.01), clock=asyncio.get_running_loop().time
        ) as cluster:
            cluster.listen(Heard(gone=heard.append, reached=lambda backend: reached.append(backend.name)))
            while len(cluster.names()) < 3:
                await cluster.health_changed()
            cluster.check()
            flight = cluster.begin("b0/2", a_request(prompt_tokens=10), 10)
            await cluster.remove("b0", within_s=0.05)
            cluster.end(flight, BackendFailed("it was closed"))
            cluster.check()
            assert not cluster.names()
        assert (heard, reached, server.left) == (["b0", "b0/1", "b0/2"], ["b0"], ["b0"])

    run_virtually(run())


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_happens_the_ranks_of_a_server_agree(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(a_server(count=rng.randint(1, 4)))
    cluster, flights = stage.cluster, list[Flight]()
    for _ in range(150):
        stage.now += rng.expovariate(1.0)
        chance = rng.random()
        if chance < 0.15:
            stage.server.count = rng.randint(1, 4)
        elif chance < 0.3:
            stage.server.is_well = rng.random() < 0.7
        elif chance < 0.5:
            await cluster.probe(rng.choice(sorted(cluster.names())))
        elif chance < 0.75:
            may = [view.name for view in stage.views().values() if view.healthy and view.may_take != 0]
            if may:
                flights.append(stage.begin(rng.choice(may)))
        elif flights:
            flight = flights.pop(rng.randrange(len(flights)))
            cluster.end(flight, rng.choice((None, None, BackendFailed("x"))))
        views = stage.views().values()
        assert len({view.healthy for view in views}) == 1
        server = cluster.server_of("b0")
        assert server.ranks == list(cluster.names())
        assert sum(flight is server.trial for flight in flights) <= 1
        reported = {name: healthy for _, name, healthy in (event for event in stage.heard if event[0] == "health")}
        assert {reported.get(view.name, False) for view in views} == {server.health.may_serve}
    for flight in flights:
        cluster.end(flight)
    cluster.check()
