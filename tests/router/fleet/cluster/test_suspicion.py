"""A server that shows no sign of life gets no requests, and those that another can take or continue go elsewhere."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from backends.fake import FakeBackend
from policies.errors import BackendFailed
from policies.health import HealthRules
from policies.nouns import Delta
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight
from tests.policies.builders import a_request
from tests.router.parts import MODEL
from tests.shards.attached import eventually

RULES = HealthRules(probe_timeout_s=2.0, suspect_s=0.02)


@dataclass
class Stopped(FakeBackend):
    """Its probes wait until it `goes_on`, or end at once with a failure if it `refuses`."""

    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    refuses: bool = False

    async def probe(self) -> None:
        if self.refuses:
            raise BackendFailed("it does not answer")
        await self.goes_on.wait()


async def a_cluster(*models: str) -> tuple[Cluster, list[Stopped]]:
    """A backend for each of `models`, all reached."""
    backends = [Stopped(f"b{at}", "own", models=frozenset({model})) for at, model in enumerate(models)]
    cluster = Cluster(backends, rules=RULES)
    for backend in backends:
        backend.goes_on.set()
        assert await cluster.probe(backend.name)
    return cluster, backends


def sent(cluster: Cluster, given_up: list[Flight], *, can_move: bool = True) -> Flight:
    """A request at b0 that notes in `given_up` that it was given up."""
    flight = cluster.begin("b0", a_request(model=MODEL), 1)
    flight.give_up, flight.can_move = lambda _: given_up.append(flight), lambda: can_move
    return flight


def healthy(cluster: Cluster) -> list[bool]:
    return [backend.healthy for backend in cluster.view(0.0).backends]


async def test_a_server_whose_probe_waits_too_long_is_suspect_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster, (stopped, _) = await a_cluster(MODEL, MODEL)
    given_up: list[Flight] = []
    flight = sent(cluster, given_up)
    stopped.goes_on.clear()
    with caplog.at_level(logging.WARNING, "pointsman.cluster"):
        probe = asyncio.create_task(cluster.probe("b0"))
        await eventually(lambda: bool(given_up))
    assert given_up == [flight]
    assert healthy(cluster) == [False, True]
    assert not cluster.may_serve("b0", MODEL)
    assert "b0 shows no sign of life" in caplog.text
    stopped.goes_on.set()
    assert await probe
    assert healthy(cluster) == [True, True]
    assert cluster.may_serve("b0", MODEL)
    cluster.end(flight)
    cluster.check()


async def test_a_request_stays_where_no_other_backend_can_take_it() -> None:
    cluster, (stopped, _) = await a_cluster(MODEL, "another model")
    given_up: list[Flight] = []
    flight = sent(cluster, given_up)
    stopped.goes_on.clear()
    probe = asyncio.create_task(cluster.probe("b0"))
    await eventually(lambda: not all(healthy(cluster)))
    assert not given_up
    stopped.goes_on.set()
    assert await probe
    cluster.end(flight)


async def test_a_piece_of_any_answer_is_a_sign_of_life_and_an_answer_that_no_other_can_continue_stays() -> None:
    cluster, (stopped, _) = await a_cluster(MODEL, MODEL)
    given_up: list[Flight] = []
    waits, answered = sent(cluster, given_up), sent(cluster, given_up, can_move=False)
    stopped.goes_on.clear()
    probe = asyncio.create_task(cluster.probe("b0"))
    await asyncio.sleep(0)
    answered.heard(Delta(text="a"), cluster._clock())
    await asyncio.sleep(RULES.suspect_s / 2)
    answered.heard(Delta(text="b"), cluster._clock())
    await asyncio.sleep(RULES.suspect_s * 0.75)
    assert healthy(cluster) == [True, True]
    assert not given_up
    stopped.goes_on.set()
    assert await probe
    # no piece comes during the next one
    stopped.goes_on.clear()
    probe = asyncio.create_task(cluster.probe("b0"))
    await eventually(lambda: bool(given_up))
    assert given_up == [waits]
    stopped.goes_on.set()
    assert await probe
    for flight in (waits, answered):
        cluster.end(flight)


async def test_an_answer_that_another_backend_can_continue_goes_elsewhere_too() -> None:
    cluster, (stopped, _) = await a_cluster(MODEL, MODEL)
    given_up: list[Flight] = []
    answered = sent(cluster, given_up)
    answered.heard(Delta(text="a"), cluster._clock())
    stopped.goes_on.clear()
    probe = asyncio.create_task(cluster.probe("b0"))
    await eventually(lambda: given_up == [answered])
    stopped.goes_on.set()
    assert await probe
    cluster.end(answered)


async def test_the_silence_begins_with_the_last_piece_and_need_not_wait_for_another_probe() -> None:
    cluster, (stopped, _) = await a_cluster(MODEL, MODEL)
    given_up: list[Flight] = []
    waits, answered = sent(cluster, given_up), sent(cluster, given_up, can_move=False)
    stopped.goes_on.clear()
    probe = asyncio.create_task(cluster.probe("b0"))
    await asyncio.sleep(RULES.suspect_s / 2)
    # bytes that were on their way when it stopped
    answered.heard(Delta(text="a"), cluster._clock())
    await eventually(lambda: bool(given_up))
    assert given_up == [waits]
    assert healthy(cluster) == [False, True]
    assert not probe.done(), "the same probe still waits"
    stopped.goes_on.set()
    assert await probe
    for flight in (waits, answered):
        cluster.end(flight)


async def test_probes_that_fail_one_after_the_other_are_one_silence() -> None:
    cluster, (stopped, _) = await a_cluster(MODEL, MODEL)
    given_up: list[Flight] = []
    flight = sent(cluster, given_up)
    stopped.refuses = True
    assert await cluster.probe("b0"), "one failure does not make it ill"
    assert healthy(cluster) == [True, True]
    await asyncio.sleep(2 * RULES.suspect_s)
    stopped.refuses = False
    stopped.goes_on.clear()
    probe = asyncio.create_task(cluster.probe("b0"))
    await asyncio.sleep(0.005)
    assert given_up == [flight], "it was silent for longer than the time of this probe"
    stopped.goes_on.set()
    assert await probe
    cluster.end(flight)


async def test_a_server_that_fails_a_probe_is_soon_probed_again_though_it_still_serves() -> None:
    cluster, (failing, _) = await a_cluster(MODEL, MODEL)
    assert await cluster._probe_until_well("b0")
    failing.refuses = True
    assert not await cluster._probe_until_well("b0")
    assert cluster.may_serve("b0", MODEL)
    failing.refuses = False
    assert await cluster._probe_until_well("b0")
