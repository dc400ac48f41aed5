"""LoRA adapters in decisions: a backend that has one ready is expected to answer sooner than one that does not."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from backends.base import Description, Load
from backends.fake import FakeBackend
from policies.catalogue import builtin_catalogue
from policies.errors import BackendFailed
from policies.learning.adapters import PRIOR_S, Readiness
from policies.nouns import BackendView, Decision, Delta, Usage
from router.fleet.cluster.cluster import Cluster
from tests.policies.builders import a_request

DEFAULT = builtin_catalogue().policies["default"]


@dataclass
class TunedBackend(FakeBackend):
    """Serves a model, and adapters of it: those that it lists, and those that it would load."""

    lists: frozenset[str] = frozenset()
    loads: frozenset[str] = frozenset()

    def describe(self) -> Description | None:
        tuned = self.lists | self.loads
        return Description(frozenset({"m"}) | tuned, adapters=self.lists, tuned=tuned, loadable=self.loads)


@dataclass
class Stage:
    """A cluster on a clock that the test moves."""

    backends: tuple[TunedBackend, ...]
    now: float = 100.0
    cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        self.cluster = Cluster(self.backends, clock=lambda: self.now)

    async def well(self) -> Stage:
        for backend in self.backends:
            assert await self.cluster.probe(backend.name)
        return self

    def seen(self, model: str = "sql") -> dict[str, BackendView]:
        return {view.name: view for view in self.cluster.view(self.now, model=model).backends}

    def decide(self, model: str = "sql") -> Decision:
        view = self.cluster.view(self.now, model=model)
        return DEFAULT.decide(a_request(model=model, prompt_tokens=100), view, random.Random(1))

    def answer(self, name: str, ttft_s: float, model: str = "sql") -> None:
        flight = self.cluster.begin(name, a_request(model=model, prompt_tokens=100), 100)
        self.now += ttft_s
        flight.heard(Delta(text="x"), self.now)
        flight.heard(Delta(finish_reason="stop"), self.now)
        self.cluster.end(flight)


def a_backend(name: str, *lists: str, loads: tuple[str, ...] = (), slots: int = 1) -> TunedBackend:
    reported = Load(adapter_slots=slots)
    return TunedBackend(name, lists=frozenset(lists), loads=frozenset(loads), reported=reported)


async def test_a_request_for_an_adapter_goes_where_it_is_ready_also_if_more_runs_there() -> None:
    stage = await Stage((a_backend("b0", loads=("sql",)), a_backend("b1", "sql"), a_backend("b2"))).well()
    assert [view.adapter for view in stage.seen().values()] == ["loads", "known", None]
    stage.answer("b1", 0.1)
    assert [view.adapter for view in stage.seen().values()] == ["loads", "ready", None]
    stage.cluster.begin("b1", a_request(model="sql", prompt_tokens=100), 100)
    decision = stage.decide()
    assert decision.chosen == "b1"
    assert dict(decision.dropped) == {"b2": "serves_model"}


async def test_a_request_for_the_model_itself_waits_for_no_adapter() -> None:
    stage = await Stage((a_backend("b0", "sql", loads=("poem",)),)).well()
    (view,) = stage.seen("m").values()
    assert (view.adapter, view.queue_s) == (None, 0.0)


async def test_an_adapter_that_every_backend_would_have_to_load_is_loaded_by_one_of_them() -> None:
    stage = await Stage((a_backend("b0", loads=("sql",)), a_backend("b1", loads=("sql",)))).well()
    chosen = stage.decide().chosen
    assert chosen is not None
    stage.cluster.begin(chosen, a_request(model="sql", prompt_tokens=100), 100)
    # it is on its way there, and a second backend would have to begin anew
    assert stage.seen()[chosen].adapter == "ready"
    assert stage.decide().chosen == chosen


async def test_while_another_adapter_uses_the_only_slot_a_backend_with_a_free_one_is_better() -> None:
    stage = await Stage((a_backend("b0", "sql", "poem"), a_backend("b1", "sql", "poem"))).well()
    stage.cluster.begin("b0", a_request(model="poem", prompt_tokens=100), 100)
    assert [view.adapter for view in stage.seen().values()] == ["no_slot", "known"]
    assert stage.decide().chosen == "b1"


async def test_what_loading_takes_is_learnt_and_counts_neither_for_the_speed_nor_for_other_states() -> None:
    stage = await Stage((a_backend("b0", loads=("sql",)),)).well()
    before = stage.seen()["b0"].latency
    for _ in range(20):
        stage.answer("b0", 3.0)
    view = stage.seen()["b0"]
    assert 2.5 < view.queue_s < 3.0
    assert view.latency == before
    stage.backends[0].lists, stage.backends[0].loads = frozenset({"sql"}), frozenset()
    stage.answer("b0", 0.01)
    stage.backends[0].lists |= {"poem"}
    assert stage.seen("poem")["b0"].queue_s == PRIOR_S[Readiness.KNOWN]
    stage.cluster.check()


async def test_a_backend_that_fails_its_probe_may_have_been_started_anew_with_empty_slots() -> None:
    stage = await Stage((a_backend("b0", "sql"),)).well()
    stage.answer("b0", 0.1)
    assert stage.seen()["b0"].adapter == "ready"
    stage.backends[0].is_well = False
    await stage.cluster.probe("b0")
    assert stage.seen()["b0"].adapter == "known"


async def test_a_request_that_failed_uses_no_slot_any_more() -> None:
    stage = await Stage((a_backend("b0", "sql", "poem"),)).well()
    flight = stage.cluster.begin("b0", a_request(model="sql", prompt_tokens=100), 100)
    stage.cluster.end(flight, BackendFailed("x"))
    stage.cluster.check()
    assert stage.seen("poem")["b0"].adapter == "known"


async def test_an_answer_in_one_piece_teaches_what_loading_takes_too() -> None:
    stage = await Stage((a_backend("b0", loads=("sql",)),)).well()
    before = stage.seen()["b0"].latency
    for _ in range(20):
        flight = stage.cluster.begin("b0", a_request(model="sql", prompt_tokens=100), 100)
        stage.now += 3.0
        flight.heard(Delta(text="x", tokens=1, finish_reason="stop", usage=Usage(100, 1), is_whole=True), stage.now)
        stage.cluster.end(flight)
    view = stage.seen()["b0"]
    assert 2.5 < view.queue_s < 3.0
    assert view.latency == before
