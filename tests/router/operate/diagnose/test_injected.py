"""Faults of a simulated fleet: the diagnosis names each, and attributes at least 90 % of its losses.

The truth is a second simulation of the same requests, without the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from router.operate.diagnose.hit_rate import accounts_of
from router.operate.diagnose.nouns import MissedTarget
from simulation.arrivals import Arrival
from simulation.changes import Slowdown
from simulation.speed import Machine
from simulation.workloads import WORKLOADS, load_of
from tests.router.operate.diagnose.scene import (
    LARGE,
    ForgetfulFleet,
    LateFleet,
    Simulated,
    a_file,
    questions,
    simulated,
)
from tests.simulation.scene import EVEN, a_config, a_fleet

RIGHT = 0.9
USUAL = questions(150, documents=10, gap_s=0.7)
MANY = questions(200, documents=60, gap_s=0.5, chunks=3)
TWO_TENANTS = questions(150, documents=10, gap_s=0.7, tenants=("acme", "labs"))


def healthy(log: Path) -> Simulated:
    return simulated(log, a_file(), USUAL)


def small_caches(log: Path) -> Simulated:
    return simulated(log, a_file(), MANY, fleet=a_fleet(a_file(), Machine(EVEN, kv_tokens=32_768)))


def late_events(log: Path) -> Simulated:
    fleet = a_fleet(a_file(), LARGE)
    late = LateFleet(fleet.counts, fleet.machines, fleet.unnamed, late_s=60.0)
    return simulated(log, a_file(), USUAL, fleet=late)


def silent_evictions(log: Path) -> Simulated:
    fleet = a_fleet(a_file(), LARGE)
    return simulated(log, a_file(), USUAL, fleet=ForgetfulFleet(fleet.counts, fleet.machines, fleet.unnamed, every=5))


FAULTS: dict[str, tuple[Callable[[Path], Simulated], Callable[[Path], Simulated]]] = {
    "capacity": (small_caches, lambda log: simulated(log, a_file(), MANY)),
    "cache_domains": (
        lambda log: simulated(log, a_file(), TWO_TENANTS),
        lambda log: simulated(log, a_file(shares=True), TWO_TENANTS),
    ),
    "placement": (lambda log: simulated(log, a_file(policy="round_robin"), USUAL), healthy),
    "index_errors": (late_events, healthy),
    "engine_eviction": (silent_evictions, healthy),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_the_cause_of_lost_tokens_is_named_and_nearly_all_of_them_are_attributed(cause: str, tmp_path: Path) -> None:
    fault, truth = (make(tmp_path / name) for make, name in zip(FAULTS[cause], ("fault", "truth"), strict=True))
    before, after = truth.cached(), fault.cached()
    lost = {request: max(0, before[request] - after[request]) for request in before}
    assert sum(lost.values()) > 10_000, "the fault costs something"

    found = fault.diagnosis.hit_rate
    assert found is not None
    largest = max(found.losses, key=lambda loss: loss.tokens)
    assert largest.cause == cause
    assert largest.examples
    assert sum(loss.tokens for loss in found.losses) == found.ideal_tokens - found.measured_tokens
    assert fault.diagnosis.notes == ()

    accounts = accounts_of(fault.contents.requests, fault.sizes)
    right = sum(min(lost[account.request.id], getattr(account.lost, cause)) for account in accounts)
    print(f"{cause}: {right:,} of {sum(lost.values()):,} lost tokens")
    assert right >= RIGHT * sum(lost.values())
    assert right >= RIGHT * sum(loss.tokens for loss in found.losses)


def missed(simulation: Simulated, target: str) -> MissedTarget:
    return next(found for found in simulation.diagnosis.targets if found.target == target)


def seconds_of(found: MissedTarget) -> dict[str, float]:
    assert sum(cause.seconds for cause in found.causes) == pytest.approx(found.seconds)
    assert sum(cause.requests for cause in found.causes) == found.missed
    return {cause.cause: cause.seconds for cause in found.causes}


@pytest.mark.parametrize("target", ["TTFT", "TPOT"])
def test_a_backend_that_becomes_slow_is_named_for_the_seconds_that_it_costs(target: str, tmp_path: Path) -> None:
    before = healthy(tmp_path / "truth")
    after = simulated(tmp_path / "fault", a_file(), USUAL, changes=(Slowdown(10.0, "own-1", 8.0),))
    found = missed(after, target)
    pairs = list(zip(before.run.calls, after.run.calls, strict=True))
    if target == "TTFT":
        extra = [(then.ttft_s or 0.0, now.ttft_s or 0.0, 0.5, 1) for then, now in pairs]
    else:
        extra = [(then.tpot_s or 0.0, now.tpot_s or 0.0, 0.04, now.arrival.new_tokens - 1) for then, now in pairs]
    lost_s = sum(steps * (now - then) for then, now, target_s, steps in extra if now > target_s)
    slow_s = seconds_of(found)["slow_backend"]
    print(f"slow_backend ({target}): {slow_s:.2f} s of {lost_s:.2f} s")
    assert RIGHT * lost_s <= slow_s <= lost_s / RIGHT
    (example, *_) = max(found.causes, key=lambda cause: cause.seconds).examples
    assert example.backend == "own-1"


def test_waiting_in_the_router_is_told_from_waiting_at_the_backend(tmp_path: Path) -> None:
    burst = [replace(asked, at_s=round(20 * (asked.number // 30) + 0.01 * (asked.number % 30), 3)) for asked in USUAL]
    few = a_fleet(a_file(), replace(LARGE, running=2))
    router = simulated(tmp_path / "few", a_file(), burst, fleet=few)
    seconds = seconds_of(missed(router, "TTFT"))
    waited_s = sum(
        (call.placed_s or 0.0) - call.arrival.at_s for call in router.run.calls if (call.ttft_s or 0.0) > 0.5
    )
    assert max(seconds, key=seconds.__getitem__) == "router_queue"
    assert seconds["router_queue"] == pytest.approx(waited_s, abs=0.01)

    backend = seconds_of(missed(simulated(tmp_path / "many", a_file(), burst), "TTFT"))
    assert max(backend, key=backend.__getitem__) == "backend_queue"
    assert backend["router_queue"] < 0.01


def test_long_prompts_beside_short_answers_are_interference(tmp_path: Path) -> None:
    long = [Arrival(1000 + number, round(5 + 1.9 * number, 3), 20_000, 5, tenant="labs") for number in range(50)]
    both = sorted([*USUAL, *long], key=lambda asked: asked.at_s)
    seconds = seconds_of(missed(simulated(tmp_path / "both", a_file(), both), "TPOT"))
    assert max(seconds, key=seconds.__getitem__) == "interference"


def test_a_loaded_fleet_is_diagnosed_as_an_idle_one(tmp_path: Path) -> None:
    machines = [Machine()] * 8
    load = load_of(WORKLOADS["documents"], machines, share=0.9, seed=1)
    addresses = ", ".join(f"'a:{number}'" for number in range(8))
    text = "classes: {chat: {ttft_p95: 1s, tpot_p95: 15ms}}\nrules: [{class: chat, policy: round_robin}]\n"
    config = a_config(f"{text}pools: {{own: {{kind: shard, at: [{addresses}], models: {{m: m}}}}}}\n")
    found = simulated(tmp_path / "log", config, load.arrivals, fleet=a_fleet(config, machines[0])).diagnosis

    assert found.hit_rate is not None
    assert found.hit_rate.ideal_tokens == pytest.approx(sum(load.cached), rel=0.005)
    points = {loss.cause: loss.points for loss in found.hit_rate.losses}
    assert points["placement"] >= RIGHT * sum(points.values())
    # every backend is as fast as predicted: what others did there explains the time of those that waited
    for target in found.targets:
        assert target.missed > 100
        assert seconds_of(target)["slow_backend"] < 0.05 * target.seconds


def test_nothing_is_lost_and_nothing_missed_without_a_fault(tmp_path: Path) -> None:
    found = healthy(tmp_path / "log").diagnosis
    assert found.hit_rate is not None
    assert found.hit_rate.ideal_tokens == found.hit_rate.measured_tokens
    assert [target.missed for target in found.targets] == [0, 0]
