from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from backends.base import Load
from backends.fake import FakeBackend
from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Delta
from router.cluster import Cluster, HealthRules
from router.flights import Flight
from tests.policies.builders import a_request
from tests.router.parts import MODEL, ScriptedBackend, some_assets


def a_backend(name: str = "b0", pool: str = "own", **fields: Any) -> FakeBackend:
    return FakeBackend(name, pool, models=fields.pop("models", frozenset({MODEL})), **fields)


def send(cluster: Cluster, tokens: int = 1, name: str = "b0", **what: Any) -> AbstractContextManager[Flight]:
    return cluster.flying(cluster.begin(name, a_request(prompt_tokens=tokens, **what), tokens))


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_backend_is_healthy_once_a_probe_passed_and_ill_after_failures_in_a_row() -> None:
    heard: list[tuple[str, bool]] = []
    backend = a_backend()
    cluster = Cluster([backend], rules=HealthRules(failures=2), on_health=lambda *what: heard.append(what))
    assert not cluster.view(0.0).backends[0].healthy
    assert await cluster.probe("b0")
    for error in (BackendFailed("x"), InvalidRequest("x"), None, BackendFailed("x")):
        try:
            with send(cluster):
                if error:
                    raise error
        except (BackendFailed, InvalidRequest):
            pass
    assert cluster.view(0.0).backends[0].healthy, "the success in between ended the row"
    with pytest.raises(BackendFailed), send(cluster):
        raise BackendFailed("x")
    assert not cluster.view(0.0).backends[0].healthy
    assert await cluster.probe("b0")
    assert heard == [("b0", True), ("b0", False), ("b0", True)]
    cluster.check()


async def test_probes_that_fail_or_hang_make_a_backend_ill() -> None:
    class Hanging(FakeBackend):
        async def probe(self) -> None:
            if not self.is_well:
                await asyncio.Event().wait()

    backend = Hanging("b0", "own", models=frozenset({MODEL}))
    cluster = Cluster([backend], rules=HealthRules(failures=2, probe_timeout_s=0.01))
    assert await cluster.probe("b0")
    backend.is_well = False
    assert await cluster.probe("b0")
    assert not await cluster.probe("b0")


async def test_running_backends_are_probed_and_closed_at_the_end() -> None:
    backend = a_backend(is_well=False)
    async with Cluster([backend], rules=HealthRules(probe_every_s=0.01)) as cluster:
        assert backend.is_started
        changed = asyncio.create_task(cluster.health_changed())
        await asyncio.sleep(0)
        backend.is_well = True
        await asyncio.wait_for(changed, 5)
        assert cluster.pools_ready() == {"own": True}
    assert backend.closed.is_set()


def test_what_was_sent_since_the_last_report_is_added_to_it() -> None:
    clock, backend = Clock(), a_backend()
    cluster = Cluster([backend], clock=clock)
    with send(cluster, 1000):
        clock.now = 101.0
        backend.reported = Load(running=5, waiting=1, waiting_tokens=700, free_tokens=9000, reported_at=101.0)
        clock.now = 102.0
        with send(cluster, 300), send(cluster, 40):
            seen = cluster.view(clock.now).backends[0]
            assert (seen.running, seen.waiting, seen.waiting_tokens, seen.free_tokens) == (5, 3, 1040, 8660)
            assert seen.reported_s_ago == 1.0
        seen = cluster.view(clock.now).backends[0]
        assert (seen.running, seen.waiting, seen.waiting_tokens) == (5, 1, 700)
    cluster.check()


def test_a_backend_that_reports_nothing_is_known_by_what_was_sent() -> None:
    cluster = Cluster([a_backend()])
    with send(cluster, 100) as first, send(cluster, 50):
        first.heard(Delta(text="x"), 0.0)
        seen = cluster.view(0.0).backends[0]
    assert (seen.running, seen.waiting, seen.waiting_tokens, seen.reported_s_ago) == (1, 1, 50, None)
    assert cluster.view(0.0).backends[0].running == 0


def test_nobody_knows_what_a_backend_without_cache_reports_holds() -> None:
    cluster = Cluster([a_backend("b0"), a_backend("b1")])
    assert [seen.held_tokens for seen in cluster.view(0.0, {"b1": 64}).backends] == [None, 64]


def test_a_view_is_a_snapshot() -> None:
    cluster = Cluster([a_backend()])
    before = cluster.view(0.0)
    with send(cluster, 100):
        assert before.backends[0].waiting == 0
        with pytest.raises(AssertionError, match="still has 1 requests"):
            cluster.check()


def test_models_are_served_by_all_pools_that_have_them() -> None:
    small = a_backend("b0", "small", context_tokens=100)
    large = a_backend("b1", "large", context_tokens=900, speaks_tokens=True, files=some_assets())
    cluster = Cluster([small, large, a_backend("b2", models=frozenset({"other"})), ScriptedBackend("b3", well=False)])
    models = cluster.models()
    assert sorted(models) == ["other", MODEL]
    tiny = models[MODEL]
    assert (tiny.pools, tiny.backends, tiny.context_tokens) == (frozenset({"small", "large"}), 2, 900)
    assert tiny.assets == some_assets()
    assert cluster.model("nothing") is None
    assert list(cluster.unreached()) == ["b3"]


async def test_the_most_that_is_held_is_that_of_a_backend_that_may_serve() -> None:
    async with Cluster([a_backend("b0"), a_backend("b1"), a_backend("b2", models=frozenset({"other"}))]) as cluster:
        held = {"b0": 64, "b1": 640, "b2": 6400, "gone": 9}
        for name in ("b0", "b1", "b2"):
            assert await cluster.probe(name)
        assert cluster.most_held(MODEL, held) == 640
        cluster.drain("b1")
        assert cluster.most_held(MODEL, held) == 64
        assert cluster.most_held("nobody's", held) == 0
