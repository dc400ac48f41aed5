"""A request with a backend that is late is given up, if another one can take it or the ceiling has passed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.base import Description, Load
from backends.fake import FakeBackend
from policies.errors import BackendFailed, BackendHung
from policies.health import HealthRules
from policies.nouns import ACCEPTED, Delta, ServiceClass, Usage
from policies.timeouts import Bounds, Timeouts
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight
from tests.policies.builders import a_request
from tests.router.parts import MODEL

RULES = HealthRules(timeouts=Timeouts(Bounds(2.0, 40.0), Bounds(4.0, 60.0), Bounds(8.0, 80.0)))
TOKEN = Delta(token_ids=(1,))


@dataclass
class Known(FakeBackend):
    """A fake that may answer in one piece."""

    whole: bool = False

    def describe(self) -> Description | None:
        return Description(self.models, may_answer_whole=self.whole)


@dataclass
class Fleet:
    """A cluster on a clock that the test moves. `given_up` has each flight that was given up, with the failure."""

    backends: list[Known]
    rules: HealthRules = RULES
    now: float = 1000.0
    given_up: dict[Flight, BackendFailed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster = Cluster(self.backends, clock=lambda: self.now, rules=self.rules)

    async def well(self) -> Fleet:
        for backend in self.backends:
            assert await self.cluster.probe(backend.name)
        return self

    def with_rules(self, rules: HealthRules) -> Fleet:
        """The same backends, not yet well, by these rules."""
        return Fleet(self.backends, rules)

    def send(self, name: str = "b0", *, ttft_s: float = 0.0, is_first_try: bool = True, **fields: Any) -> Flight:
        promised = ServiceClass("chat", 0, ttft_s=ttft_s)
        request = a_request(**{"model": MODEL, "prompt_tokens": 100, "promised": promised, **fields})
        flight = self.cluster.begin(name, request, request.prompt_tokens, is_first_try=is_first_try)
        flight.give_up = lambda failure: self.given_up.setdefault(flight, failure)
        return flight

    def hears(self, flight: Flight, delta: Delta = TOKEN) -> None:
        flight.heard(delta, self.now)
        if delta is not ACCEPTED:
            flight.relayed(self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.cluster.end_overdue()

    def serves(self, requests: int = 30, *, head_s: float = 0.01, first_s: float = 0.1) -> Fleet:
        """It answers so many requests, so that its times are known."""
        for _ in range(requests):
            flight = self.send()
            self.now += head_s
            self.hears(flight, ACCEPTED)
            self.now += first_s - head_s
            self.hears(flight)
            for _ in range(10):
                self.now += 0.02
                self.hears(flight)
            self.cluster.end(flight)
        return self


def two(models: tuple[str, str] = (MODEL, MODEL), pools: tuple[str, str] = ("own", "own"), **fields: Any) -> Fleet:
    return Fleet(
        [
            Known(f"b{at}", pool, models=frozenset({model}), **fields)
            for at, (model, pool) in enumerate(zip(models, pools, strict=True))
        ]
    )


async def a_fleet(**fields: Any) -> Fleet:
    return (await two(**fields).well()).serves()


async def test_a_server_that_never_begins_to_answer_loses_the_request_after_the_first_bytes_timeout() -> None:
    fleet = await a_fleet()
    flight = fleet.send()
    fleet.passes(1.9)
    assert not fleet.given_up
    fleet.passes(0.2)
    assert "b0 sent no byte for 2.1 s" in str(fleet.given_up[flight])


async def test_a_server_that_sends_a_head_and_then_nothing_loses_it_after_the_first_tokens_timeout() -> None:
    fleet = await a_fleet()
    flight = fleet.send()
    fleet.now += 0.1
    fleet.hears(flight, ACCEPTED)
    fleet.passes(3.8)
    assert not fleet.given_up
    fleet.passes(0.2)
    assert "b0 sent no first token for 4.1 s" in str(fleet.given_up[flight])


async def test_between_two_tokens_the_third_timeout_runs() -> None:
    fleet = await a_fleet()
    flight = fleet.send()
    fleet.hears(flight)
    fleet.passes(7.9)
    fleet.hears(flight)
    fleet.passes(7.9)
    assert not fleet.given_up
    fleet.passes(0.2)
    assert "b0 sent no token for 8.1 s" in str(fleet.given_up[flight])


async def test_the_time_that_a_client_takes_to_read_is_not_the_backends() -> None:
    fleet = await a_fleet()
    flight = fleet.send()
    flight.heard(TOKEN, fleet.now)
    flight.hold()
    fleet.passes(100.0)
    assert not fleet.given_up
    flight.relayed(fleet.now)
    fleet.passes(7.9)
    assert not fleet.given_up
    fleet.passes(0.2)
    assert flight in fleet.given_up


async def test_without_another_backend_a_request_stays_until_the_ceiling() -> None:
    for alone in (
        await (await two(models=(MODEL, "another")).well()).serves().well(),
        await (await two(pools=("own", "rented")).well()).serves().well(),
    ):
        flight = alone.send(pools=("own",))
        alone.hears(flight, ACCEPTED)
        alone.passes(59.9)
        assert not alone.given_up
        alone.passes(0.2)
        assert flight in alone.given_up


async def test_a_backend_that_was_never_observed_has_much_longer() -> None:
    fleet = await two().well()
    flight = fleet.send(prompt_tokens=2000)
    fleet.passes(30.0)
    assert not fleet.given_up
    fleet.passes(30.1)
    assert flight in fleet.given_up, "not longer than the ceiling of the first token"


async def test_a_giant_prompt_on_a_slow_backend_has_as_long_as_it_is_predicted_to_take() -> None:
    fleet = (await two().well()).serves(first_s=1.0)
    quick, giant = fleet.send(prompt_tokens=10), fleet.send(prompt_tokens=3000)
    fleet.hears(giant, ACCEPTED)
    fleet.hears(quick, ACCEPTED)
    fleet.passes(59.0)
    assert quick in fleet.given_up
    assert giant not in fleet.given_up, "its prefill is predicted to take 30 s"


@pytest.mark.parametrize(
    ("sent", "timeout_s"),
    [({}, 4.0), ({"ttft_s": 3.0}, 12.0), ({"is_first_try": False}, 8.0), ({"ttft_s": 125.0}, 60.0)],
)
async def test_a_class_that_waits_longer_and_a_second_try_have_longer_timeouts(
    sent: dict[str, Any], timeout_s: float
) -> None:
    fleet = await a_fleet()
    flight = fleet.send(**sent)
    fleet.hears(flight, ACCEPTED)
    fleet.passes(timeout_s - 0.1)
    assert not fleet.given_up
    fleet.passes(0.2)
    assert flight in fleet.given_up


async def test_an_answer_in_one_piece_may_take_as_long_as_the_longest() -> None:
    fleet = await a_fleet(whole=True)
    whole = fleet.send(max_new_tokens=1000)
    streamed = fleet.send(max_new_tokens=1000, stream=True)
    fleet.passes(20.0)
    assert list(fleet.given_up) == [streamed]
    fleet.passes(600.0)
    assert list(fleet.given_up) == [streamed, whole]


async def test_progress_of_the_prefill_is_a_sign_of_life() -> None:
    fleet = await a_fleet()
    flight = fleet.send()
    for done in range(10):
        fleet.hears(flight, Delta(computed_tokens=10 * done, expected_s=1.0))
        fleet.passes(3.9)
    assert not fleet.given_up
    fleet.passes(0.2)
    assert flight in fleet.given_up


async def test_a_shard_whose_engine_reports_new_steps_is_alive() -> None:
    fleet = await a_fleet()
    waits, preempted = fleet.send(), fleet.send()
    fleet.hears(preempted)
    for _ in range(20):
        fleet.backends[0].reported = Load(worked_at=fleet.now)
        fleet.passes(1.9)
    assert not fleet.given_up
    fleet.passes(10.0)
    assert list(fleet.given_up) == [waits, preempted], "its load is reported on, and its engine does no step"


async def test_a_request_may_be_in_the_queue_of_a_server_that_reports_one_and_answers_others() -> None:
    fleet = await a_fleet()
    fleet.backends[0].reported = Load(waiting=3)
    waits, runs = fleet.send(), fleet.send()
    for _ in range(20):
        fleet.hears(runs)
        fleet.passes(1.9)
    assert not fleet.given_up
    fleet.passes(2.0)
    assert waits in fleet.given_up, "the queue does not move either"


@pytest.mark.parametrize(
    ("others_are_answered", "probes_are", "kind"),
    [
        (True, False, BackendHung),
        (False, True, BackendHung),
        (False, False, BackendFailed),
    ],
)
async def test_a_request_that_hangs_alone_may_be_the_cause(
    others_are_answered: bool, probes_are: bool, kind: type
) -> None:
    fleet = await a_fleet()
    hangs, other = fleet.send(), fleet.send()
    fleet.now += 1.0
    if others_are_answered:
        fleet.hears(other)
    if not probes_are:
        fleet.cluster.server_of(hangs.backend).health.probe_failed(fleet.now, "no answer")
    fleet.passes(1.5)
    assert type(fleet.given_up[hangs]) is kind


async def test_a_router_that_had_no_cpu_does_not_hold_that_against_backends() -> None:
    fleet = await a_fleet()
    async with fleet.cluster:
        flight = fleet.send()
        await asyncio.sleep(0.01)
        fleet.now += 30.0
        await _a_look_of(fleet.cluster)
        assert not fleet.given_up
        fleet.now += 1.0
        fleet.cluster.end_overdue()
        assert not fleet.given_up
        fleet.cluster.end(flight)
    fleet.cluster.check()


async def _a_look_of(cluster: Cluster) -> None:
    """Wait until the cluster has looked for late backends by itself."""
    looked = asyncio.Event()
    look = cluster.end_overdue

    def noted() -> None:
        look()
        looked.set()

    cluster.end_overdue = noted  # type: ignore[method-assign]
    await asyncio.wait_for(looked.wait(), 5)


PIECE, USED = Delta(text="a", tokens=1), Usage(prompt_tokens=100, completion_tokens=5)

ANSWERS = {
    "streamed": (PIECE, PIECE),
    "streamed in one piece": (Delta(text="abc", tokens=5, usage=USED),),
    "whole": (Delta(text="abc", tokens=5, is_whole=True, usage=USED),),
    "whole, of one token": (Delta(text="a", tokens=1, is_whole=True),),
    "whole, of unknown length": (Delta(text="abc", is_whole=True),),
}
"""Answers of a backend by their form; not each of them tells how long a prompt or a step takes."""


def serve_at(fleet: Fleet, name: str, form: str, prompt_tokens: int = 100, seconds: float = 0.01) -> None:
    """The backend of this `name` answers a request in this form."""
    streams = form.startswith("streamed")
    flight = fleet.send(name, prompt_tokens=prompt_tokens, stream=streams, max_new_tokens=8192)
    fleet.now += seconds / 2
    fleet.hears(flight, ACCEPTED)
    for delta in ANSWERS[form]:
        fleet.now += seconds / 2
        fleet.hears(flight, delta)
    fleet.cluster.end(flight)


@pytest.mark.parametrize("prompt_tokens", [10, 100, 8_000])
@pytest.mark.parametrize("form", ANSWERS)
async def test_requests_at_a_backend_that_never_answered_follow_what_its_peers_teach_meanwhile(
    form: str, prompt_tokens: int
) -> None:
    fleet = await two(whole=True).with_rules(HealthRules()).well()
    streams = form.startswith("streamed")
    waiting = [
        fleet.send(promised=ServiceClass("usual", 0), prompt_tokens=prompt_tokens, stream=streams, max_new_tokens=8192)
        for _ in range(3)
    ]
    began_at = fleet.now
    fleet.passes(9.0)
    assert not fleet.given_up
    while fleet.now < began_at + 10.0:
        serve_at(fleet, "b1", form, prompt_tokens)
    fleet.passes(1.0)
    assert fleet.given_up.keys() == set(waiting)


@pytest.mark.parametrize("form", ANSWERS)
async def test_what_waits_for_its_next_token_follows_them_too(form: str) -> None:
    fleet = await two(whole=True).with_rules(HealthRules()).well()
    begun = fleet.send(promised=ServiceClass("usual", 0))
    fleet.hears(begun)
    for _ in range(20):
        serve_at(fleet, "b1", form)
    fleet.passes(25.0)
    assert begun in fleet.given_up or not form.startswith("streamed")


async def test_a_backend_that_has_answered_may_take_as_long_as_the_longest_answer_in_one_piece() -> None:
    fleet = await two(whole=True).with_rules(HealthRules()).well()
    for name in ("b0", "b1"):
        for _ in range(20):
            serve_at(fleet, name, "whole")
    long = fleet.send(promised=ServiceClass("usual", 0), stream=False, max_new_tokens=8192)
    fleet.passes(20.0)
    assert not fleet.given_up
    fleet.cluster.end(long)


async def test_a_backend_that_was_ill_has_to_prove_itself_again() -> None:
    fleet = await two(whole=True).with_rules(HealthRules()).well()
    for name in ("b0", "b1"):
        for _ in range(20):
            serve_at(fleet, name, "whole")
    for _ in range(3):
        fleet.cluster.end(fleet.send(stream=False), BackendFailed("gone"))
    fleet.now += 5.0
    assert await fleet.cluster.probe("b0")
    trial = fleet.send(promised=ServiceClass("usual", 0), stream=False, max_new_tokens=8192)
    fleet.passes(11.0)
    assert trial in fleet.given_up


async def test_a_long_prompt_has_more_time_even_if_peers_only_had_short_ones_and_taught_nothing_else() -> None:
    fleet = await two(whole=True).with_rules(HealthRules()).well()
    long = fleet.send(promised=ServiceClass("usual", 0), prompt_tokens=100_000)
    for _ in range(20):
        serve_at(fleet, "b1", "streamed in one piece")
    fleet.passes(30.0)
    assert long not in fleet.given_up
