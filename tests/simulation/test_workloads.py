"""Workloads: seeds repeat them, loads stretch them, and prompts share the beginnings that they should."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from shards.nouns import Submission
from simulation.arrivals import CHUNK_TOKENS, Arrival
from simulation.changes import Joining, Slowdown
from simulation.engine import SimulatedEngine
from simulation.speed import Machine
from simulation.workloads import (
    WORKLOADS,
    SessionRequest,
    Workload,
    alone_s,
    evenly,
    held_before,
    in_bursts,
    load_of,
    work_s,
)
from tests.simulation.scene import EVEN

MACHINES = [Machine(EVEN)] * 8


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_the_same_requests_again_in_order_of_time(name: str) -> None:
    workload = WORKLOADS[name]
    load = load_of(workload, MACHINES, share=0.6, seed=3)
    assert load == load_of(workload, MACHINES, share=0.6, seed=3)
    assert load.arrivals != load_of(workload, MACHINES, share=0.6, seed=4).arrivals
    times = [arrival.at_s for arrival in load.arrivals]
    assert times == sorted(times)
    assert [arrival.number for arrival in load.arrivals] == list(range(len(times)))
    assert workload.requests <= len(times) <= 1.2 * workload.requests
    for arrival in load.arrivals:
        assert arrival.new_tokens >= 1
        assert len(arrival.chunks) * CHUNK_TOKENS <= arrival.prompt_tokens < Machine().context_tokens


def test_twice_the_load_begins_its_sessions_in_half_the_time() -> None:
    low, high = (load_of(WORKLOADS["slow backend"], MACHINES, share=share, seed=1) for share in (0.4, 0.8))
    assert [arrival.at_s for arrival in low.arrivals] == pytest.approx(
        [2 * each.at_s for each in high.arrivals], abs=1e-5
    )
    assert low.changes[0].at_s == pytest.approx(2 * high.changes[0].at_s)


def test_requests_of_a_session_keep_their_distances() -> None:
    workload = Workload(
        "two", "two turns", lambda *_: [(SessionRequest(0.0, 100, 10), SessionRequest(3.0, 200, 10))] * 20, evenly, 40
    )
    for share in (0.1, 1.0):
        times: dict[str | None, list[float]] = {}
        for arrival in load_of(workload, MACHINES, share=share, seed=0).arrivals:
            times.setdefault(arrival.session, []).append(arrival.at_s)
        assert len(times) == 20
        assert all(second - first == pytest.approx(3.0, abs=1e-5) for first, second in times.values())


def test_an_infinite_cache_holds_the_beginnings_that_came_before() -> None:
    requests = [
        SessionRequest(0.0, 1100, 1, (1, 2)),
        SessionRequest(0.0, 1100, 1, (1, 2)),
        SessionRequest(0.0, 2000, 1, (1, 3, 2)),
        # the same name behind another beginning is another chunk
        SessionRequest(0.0, 700, 1, (2,)),
        SessionRequest(0.0, 512, 1, (1,)),
    ]
    # at least one token is always computed
    assert list(held_before(requests)) == [0, 1024, 512, 0, 511]


def test_conversations_and_agents_share_beginnings_and_long_prompts_share_none() -> None:
    shares = {}
    for name, workload in WORKLOADS.items():
        load = load_of(workload, MACHINES, share=0.6, seed=1)
        shares[name] = sum(load.cached) / sum(arrival.prompt_tokens for arrival in load.arrivals)
    assert shares["conversations"] > 0.5
    assert shares["agents"] > 0.7
    assert shares["documents"] > 0.6
    assert shares["long prompts"] == shares["long answers"] == 0.0


def test_half_of_the_requests_ask_for_the_hot_document_once_it_is_there() -> None:
    arrivals = load_of(WORKLOADS["hot document"], MACHINES, share=0.6, seed=1).arrivals
    hot = [arrival.chunks for arrival in arrivals if len(arrival.chunks) == 30]
    most = max(hot.count(chunks) for chunks in hot)
    assert 0.25 * len(arrivals) < most < 0.45 * len(arrivals)


def test_bursts_are_crowded() -> None:
    starts = in_bursts(random.Random(1), 300)
    crowded = sum(second - first < 0.001 for first, second in itertools.pairwise(starts))
    assert crowded > 2 * 0.3 * 150
    assert starts == sorted(starts)


def test_changes_and_slower_machines_belong_to_their_workloads() -> None:
    assert isinstance(WORKLOADS["slow backend"].changes[0], Slowdown)
    assert isinstance(WORKLOADS["joining backend"].changes[0], Joining)
    assert set(WORKLOADS["mixed hardware"].speeds) == {1.0, 0.5}


def test_two_machines_have_twice_the_capacity_and_slower_ones_less() -> None:
    turns = [SessionRequest(0.0, 2000, 100)] * 10
    machine = Machine(EVEN)
    assert work_s(turns, machine) > 10 * (2000 * EVEN.token_s)
    slower = replace(machine, speed=EVEN.times(2.0))
    assert work_s(turns, slower) > 2 * work_s(turns, machine)
    workload = Workload("one", "alike", lambda *_: [(turn,) for turn in turns], evenly, 10)
    alone, both = (load_of(workload, [machine] * count, share=1.0, seed=1).arrivals[-1].at_s for count in (1, 2))
    assert alone == pytest.approx(2 * both, rel=1e-4)


@pytest.mark.parametrize(("prompt_tokens", "new_tokens"), [(50, 20), (3000, 100), (20_000, 2)])
def test_the_engine_is_nearly_as_fast_as_the_bound_with_one_request(prompt_tokens: int, new_tokens: int) -> None:
    machine = Machine(EVEN)
    engine = SimulatedEngine(machine, model="m")
    engine.submit(Submission(1, prompt_tokens, new_tokens), bytes(4 * prompt_tokens), new_tokens=new_tokens, now_s=0.0)
    now_s, first_s, is_done = 0.0, None, False
    while not is_done:
        ends_s = engine.begin(now_s)
        assert ends_s is not None
        now_s = ends_s
        for drew in engine.end():
            first_s = now_s if first_s is None else first_s
            is_done = drew.is_last
    expected = alone_s(Arrival(0, 0.0, prompt_tokens, new_tokens), 0, machine)
    # the engine ends its steps early rather than late, so it needs some more of them
    assert first_s is not None
    assert expected[0] <= first_s + 1e-9 <= 1.1 * expected[0]
    assert expected[1] <= now_s + 1e-9 <= 1.1 * expected[1]
