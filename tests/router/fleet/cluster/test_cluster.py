from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from backends.base import Description, DraftedTokens, Load
from backends.fake import FakeBackend
from policies.errors import BackendFailed, InvalidRequest, Overloaded
from policies.health import HealthRules
from policies.learning.cost import Latency
from policies.nouns import Delta
from policies.predict import predicted_ttft_s
from policies.shortlist import IDLEST, LARGE
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight
from tests.policies.builders import a_request
from tests.router.parts import MODEL, Heard, ScriptedBackend, some_assets


def a_backend(name: str = "b0", pool: str = "own", **fields: Any) -> FakeBackend:
    return FakeBackend(name, pool, models=fields.pop("models", frozenset({MODEL})), **fields)


def send(cluster: Cluster, tokens: int = 1, name: str = "b0", **what: Any) -> AbstractContextManager[Flight]:
    return cluster.flying(cluster.begin(name, a_request(prompt_tokens=tokens, **what), tokens))


class Preempting(FakeBackend):
    def describe(self) -> Description | None:
        return Description(self.models, preempts=True)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_backend_is_healthy_once_a_probe_passed_and_ill_after_failures_in_a_row() -> None:
    heard: list[tuple[str, bool]] = []
    backend = a_backend()
    clock = Clock()
    cluster = Cluster([backend], clock=clock, rules=HealthRules(failures=2))
    cluster.listen(Heard(health=lambda *what: heard.append(what)))
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
    assert not await cluster.probe("b0"), "a probe that passes says little of requests that failed just now"
    clock.now += 1.0
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


async def test_a_backend_that_was_never_reached_is_logged_once_and_its_trouble_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend, clock = FakeBackend("b0", "own", models=frozenset({MODEL})), Clock()
    backend.is_well = False
    cluster = Cluster([backend], clock=clock, rules=HealthRules(failures=2))
    for _ in range(5):
        assert not await cluster.probe("b0")
        clock.now += 3.0
    (line,) = (record.getMessage() for record in caplog.records)
    trouble = cluster.trouble("b0")
    assert trouble is not None
    assert line == f"b0 is ill: it was never reached: {trouble.reason}"
    assert (trouble.since_s, trouble.was_well) == (15.0, False)
    backend.is_well = True
    assert await cluster.probe("b0")
    assert cluster.trouble("b0") is cluster.trouble("nobody") is None
    backend.is_well = False
    for _ in range(2):
        await cluster.probe("b0")
    trouble = cluster.trouble("b0")
    assert trouble is not None
    assert trouble.was_well
    assert len(caplog.records) == 2, "it became ill, and was reached before"


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


def test_the_cache_of_a_backend_without_cache_reports_is_unknown() -> None:
    cluster = Cluster([a_backend("b0"), a_backend("b1")])
    assert [seen.held_tokens for seen in cluster.view(0.0, {"b1": 64}).backends] == [None, 64]


async def test_a_backend_that_joins_a_slow_pool_is_believed_to_be_as_slow() -> None:
    clock = Clock()
    cluster = Cluster([a_backend(), a_backend("other", pool="elsewhere")], clock=clock)
    request = a_request(prompt_tokens=1000)
    for _ in range(12):
        with send(cluster, 1000) as flight:
            clock.now += 20.0
            flight.heard(Delta("x"), clock.now)
    async with cluster:
        await cluster.add(a_backend("b1"))
        view = {backend.name: backend for backend in cluster.view(clock.now).backends}
    assert predicted_ttft_s(request, view["b0"]) > 10.0
    assert predicted_ttft_s(request, view["b1"]) == pytest.approx(predicted_ttft_s(request, view["b0"]), rel=0.2)
    assert predicted_ttft_s(request, view["other"]) < 1.0, "other pools are other machines"


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


async def test_a_probe_that_brings_another_report_may_have_made_room() -> None:
    class Reporting(FakeBackend):
        running = 1

        def load(self) -> Load:
            return Load(running=self.running)

        async def probe(self) -> None:
            await super().probe()
            self.running = max(0, self.running - 1)

    heard: list[str] = []
    cluster = Cluster([Reporting("b0", "own")])
    await cluster.probe("b0")
    await cluster.probe("b0")
    cluster.on_changed = heard.append
    await cluster.probe("b0")
    assert heard == []
    backend = cluster.backend("b0")
    assert isinstance(backend, Reporting)
    backend.running = 2
    await cluster.probe("b0")
    assert heard == ["b0"]


@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_polled_backend_reports_is_kept_until_its_next_probe(fails: bool) -> None:
    class Polled(FakeBackend):
        is_polled = True
        asked = 0

        def load(self) -> Load:
            self.asked += 1
            return super().load()

        async def probe(self) -> None:
            self.reported = Load(running=self.reported.running + 1) if self.reported.running else Load(running=1)
            if fails:
                raise BackendFailed("x")

    backend = Polled("b0", "own", models=frozenset({MODEL}))
    cluster = Cluster([backend])
    for probes in range(3):
        views = [cluster.view(0.0).backends[0] for _ in range(3)]
        assert [view.running for view in views] == 3 * [probes]
        before = backend.asked
        cluster.view(0.0)
        assert backend.asked == before, "it was asked a moment ago"
        await cluster.probe("b0")


async def test_every_event_that_may_make_room_names_its_backend() -> None:
    heard: list[str] = []
    cluster = Cluster([a_backend("b0"), a_backend("b1")])
    cluster.on_changed = heard.append
    assert await cluster.probe("b1")
    assert heard == ["b1"], "its health changed"
    flight = cluster.begin("b0", a_request(), 10)
    assert heard == ["b1"], "room was taken, not made"
    cluster.end(flight)
    cluster.drain("b1")
    cluster.changed("b0")
    assert heard == ["b1", "b0", "b1", "b0"]


def test_a_request_counts_from_the_moment_it_is_decided_on() -> None:
    counts: list[Callable[[], int]] = []
    cluster = Cluster([a_backend()])
    cluster.listen(Heard(used=lambda _, count: counts.append(count)))
    flight = cluster.begin("b0", a_request(prompt_tokens=500), 500)
    assert [count() for count in counts] == [1]
    seen = cluster.view(flight.sent_at).backends[0]
    assert (seen.waiting, seen.waiting_tokens) == (1, 500)
    assert seen.queue_s > 0
    cluster.end(flight, BackendFailed("gone"))
    assert [count() for count in counts] == [0]
    cluster.check()


def test_learnt_values_are_reported_when_a_request_ends() -> None:
    clock = Clock()
    predicted: list[tuple[str, float, float]] = []
    learnt: list[tuple[str, Latency, int | None]] = []
    cluster = Cluster([a_backend()], clock=clock)
    cluster.listen(Heard(predicted=lambda *what: predicted.append(what), learnt=lambda *what: learnt.append(what)))
    with send(cluster, 1000) as flight:
        expected_s = flight.predicted_ttft_s
        for clock.now in (103.0, 104.0):
            flight.heard(Delta(text="x"), clock.now)
    assert predicted == [("b0", expected_s, 3.0)]
    ((name, latency, limit),) = learnt
    assert (name, limit) == ("b0", 8)
    assert latency.ttft_s(1000) > expected_s
    assert cluster.view(clock.now).backends[0].latency is latency


def test_a_lower_limit_is_reported_when_a_backend_refuses_a_request() -> None:
    learnt: list[int | None] = []
    cluster = Cluster([a_backend()], clock=Clock())
    cluster.listen(Heard(learnt=lambda _, __, limit: learnt.append(limit)))
    flights = [cluster.begin("b0", a_request(id=f"r{number}"), 10) for number in range(8)]
    cluster.end(flights[0], Overloaded("full"))
    (limit,) = learnt
    assert limit is not None
    assert limit < 8
    for flight in flights[1:]:
        cluster.end(flight)


def test_what_is_not_learnt_of_many_requests_at_once_is_not_reported_either() -> None:
    clock = Clock()
    learnt: list[object] = []
    cluster = Cluster([a_backend()], clock=clock)
    cluster.listen(Heard(learnt=lambda *what: learnt.append(what)))
    for number in range(300):
        flight = cluster.begin("b0", a_request(id=f"r{number}"), 10 + number)
        flight.heard(Delta(text="x"), clock.now)
        flight.heard(Delta(text="x"), clock.now + 0.001 * number)
        cluster.end(flight)
    assert 0 < len(learnt) <= 100


def test_a_shards_predictions_are_reported_when_a_request_ends() -> None:
    backend = a_backend(reported=Load())
    drafted: list[tuple[str, Mapping[str, DraftedTokens]]] = []
    cluster = Cluster([backend], clock=Clock())
    cluster.listen(Heard(drafted=lambda *what: drafted.append(what)))
    with send(cluster, 1000):
        pass
    assert drafted == []
    backend.reported = Load(drafts={"prompt": DraftedTokens(50, 20)})
    with send(cluster, 1000):
        pass
    assert drafted == [("b0", {"prompt": DraftedTokens(50, 20)})]


def test_a_shards_blocks_on_disk_are_reported_when_a_request_ends() -> None:
    backend = a_backend(reported=Load())
    heard: list[tuple[str, object]] = []
    cluster = Cluster([backend], clock=Clock())
    cluster.listen(Heard(on_disk=lambda *what: heard.append(what)))
    with send(cluster, 1000):
        pass
    assert heard == []
    backend.reported = Load(disk_blocks={"held": 3})
    with send(cluster, 1000):
        pass
    assert heard == [("b0", {"held": 3})]


def test_a_shards_steps_without_a_graph_are_reported_when_a_request_ends() -> None:
    backend = a_backend(reported=Load(uncaptured_steps=7))
    heard: list[tuple[str, int]] = []
    cluster = Cluster([backend], clock=Clock())
    cluster.listen(Heard(uncaptured=lambda *what: heard.append(what)))
    with send(cluster, 1000):
        pass
    assert heard == [("b0", 7)]


def test_what_a_request_would_push_aside_counts_as_room_in_its_own_view_alone() -> None:
    cluster = Cluster([Preempting("b0", models=frozenset({MODEL}))])
    with send(cluster, 700, rank=2, preemptible=True):
        urgent, equal, unranked = (cluster.view(0.0, rank=rank).backends[0] for rank in (0, 2, None))
    assert (urgent.reclaimable_requests, urgent.reclaimable_tokens, urgent.queue_s) == (1, 700, 0.0)
    assert (equal.reclaimable_requests, equal.reclaimable_tokens) == (0, 0)
    assert (unranked.reclaimable_requests, unranked.queue_s) == (0, equal.queue_s)


async def test_after_an_illness_one_request_is_on_trial_and_then_the_share_grows() -> None:
    clock, backend = Clock(), a_backend(reported=Load(max_requests=20))
    cluster = Cluster([backend], clock=clock, rules=HealthRules(failures=1, retry_s=1.0, slow_start_s=10.0))
    may_take = lambda: cluster.view(clock.now).backends[0].may_take  # noqa: E731
    assert await cluster.probe("b0")
    assert may_take() is None
    with pytest.raises(BackendFailed), send(cluster):
        raise BackendFailed("x")
    clock.now += 1.0
    assert await cluster.probe("b0")
    assert may_take() == 1
    heard: list[str] = []
    cluster.on_changed = heard.append
    with send(cluster) as trial:
        assert may_take() == 0
        trial.heard(Delta(text="x"), clock.now)
        assert heard == ["b0"], "requests that wait for it look again"
        assert may_take() == 1, "two at first, and one is there"
    clock.now += 5.0
    assert (may_take(), cluster.view(clock.now).backends[0].weight) == (10, 0.5)
    clock.now += 5.0
    assert (may_take(), cluster.view(clock.now).backends[0].weight) == (None, 1.0)
    cluster.check()


async def test_on_trial_only_the_request_on_trial_counts() -> None:
    clock = Clock()
    cluster = Cluster([a_backend()], clock=clock, rules=HealthRules(failures=1))
    assert await cluster.probe("b0")
    old = cluster.begin("b0", a_request(), 1)
    with pytest.raises(BackendFailed), send(cluster):
        raise BackendFailed("x")
    clock.now += 1.0
    assert await cluster.probe("b0")
    cluster.end(old, BackendFailed("an old one, late"))
    assert cluster.view(clock.now).backends[0].healthy
    cancelled = cluster.begin("b0", a_request(), 1)
    cluster.end(cancelled, asyncio.CancelledError())
    assert cluster.view(clock.now).backends[0].may_take == 1, "it reported nothing, the next is on trial"
    with pytest.raises(BackendFailed), send(cluster):
        raise BackendFailed("still ill")
    assert not cluster.view(clock.now).backends[0].healthy
    cluster.check()


async def test_a_shortlist_knows_the_chosen_backend_at_once_and_other_changes_behind_the_request() -> None:
    behind: list[Callable[[], object]] = []
    backends = [a_backend(f"b{n}", reported=Load(running=0 if n < IDLEST else 5)) for n in range(2 * LARGE)]
    cluster = Cluster(backends, rng=random.Random(1), later=lambda work, *args: behind.append(partial(work, *args)))
    for backend in backends:
        assert await cluster.probe(backend.name)
    for work in behind:
        work()
    behind.clear()

    def idlest() -> list[str]:
        return list(cluster.shortlist(a_request(model=MODEL), {}, ()) or ())[:IDLEST]

    assert idlest() == [f"b{n}" for n in range(IDLEST)]
    backends[0].reported = Load(running=50)
    cluster.changed("b0")
    with send(cluster, 60_000, "b1"):
        assert "b1" not in idlest()
        assert "b0" in idlest(), "an old note may make a candidate of a backend that has much to do"
        for work in behind:
            work()
        assert "b0" not in idlest()
    cluster.check()


async def test_a_backend_that_was_scored_is_noted_even_if_it_announced_no_change() -> None:
    behind: list[Callable[[], object]] = []
    backends = [a_backend(f"b{n}", reported=Load(running=n)) for n in range(2 * LARGE)]
    cluster = Cluster(backends, rng=random.Random(1), later=lambda work, *args: behind.append(partial(work, *args)))
    for backend in backends:
        assert await cluster.probe(backend.name)
    names = cluster.shortlist(a_request(model=MODEL), {}, ())
    assert names is not None
    assert names[0] == "b0"
    backends[0].reported = Load(running=500)
    cluster.view(0.0, among=names)
    with send(cluster, name="b9"):
        for work in behind:
            work()
    assert "b0" not in list(cluster.shortlist(a_request(model=MODEL), {}, ()) or ())[:IDLEST]
