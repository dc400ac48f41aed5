"""The backends that recent requests needed: the numbers of `pointsman plan`, while the router runs."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from policies.errors import ExpectedError
from policies.learning.cost import Ahead
from policies.nouns import BackendView, ClusterView, Decision, Delta, Request, ServiceClass
from policies.sla.config import Config
from router.call.pipeline import serve
from router.fleet.cluster.flights import Flight, Flights
from router.operate.diagnose.logged import read_logs
from router.operate.plan.plan import plan_of
from router.operate.plan.recent import KEPT_S, MOST_KEPT, READ_WITHIN_S, RECENT_S, SAME_FOR_S, RecentRequests
from router.operate.telemetry.decision_record import Ended, Made, record_of
from router.operate.telemetry.telemetry import Telemetry
from router.shared.store.memory import MemoryStore
from router.start.build import build
from simulation.arrivals import Arrival
from simulation.client import Call, SimulatedCaller
from simulation.fleet import Fleet, with_named_keys
from simulation.speed import Machine
from tests.simulation.scene import EVEN, a_config, a_fleet, arrivals, ready
from tests.virtual_time import run_virtually

TIGHT = "classes: {chat: {ttft_p95: 500ms, tpot_p95: 14ms}}\n"
LOOSE = "classes: {chat: {ttft_p95: 60s, tpot_p95: 1s}}\n"
IMPOSSIBLE = "classes: {chat: {tpot_p95: 1ms}}\n"
BEGINNING_S = 1_700_000_000.0
"""800 s after a full hour, so that all requests are of one hour."""


def needed_in(telemetry: Telemetry) -> dict[str, float]:
    """Pool -> the metric, as it is exposed."""
    return {
        sample.labels["pool"]: sample.value
        for family in telemetry.registry.collect()
        for sample in family.samples
        if sample.name == "pointsman_pool_backends_needed"
    }


async def needed_after(config: Config, fleet: Fleet, coming: Sequence[Arrival], log: Path) -> dict[str, float]:
    """The metric after a router that writes `log` has served `coming`."""
    clock = asyncio.get_running_loop().time
    keyed = with_named_keys(config)
    keyed = replace(keyed, server=replace(keyed.server, decision_log=str(log)))
    operations = build(
        keyed,
        backends=lambda listener: fleet.backends(keyed, listener, clock),
        clock=clock,
        unix_time=lambda: BEGINNING_S + clock(),
        rng=random.Random(0),
        quotas=MemoryStore(clock),
    )
    gateway, telemetry = operations.gateway, operations.telemetry
    assert telemetry.decisions is not None
    telemetry.decisions.open()
    for name in ("own-0", "own-1"):
        gateway.cluster.backend(name).on_load = gateway.cluster.changed  # type: ignore[attr-defined]
        await gateway.cluster.probe(name)
    # requests are kept from the first reading on
    assert needed_in(telemetry) == {}

    async def ask(arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at_s)
        with suppress(ExpectedError):
            await serve(SimulatedCaller(f"call-{arrival.number}", arrival.tenant, Call(arrival), clock), gateway)

    await asyncio.gather(*map(ask, coming))
    await asyncio.sleep(SAME_FOR_S)
    telemetry.decisions.close()
    await gateway.tokenizers.close()
    return needed_in(telemetry)


@pytest.mark.parametrize(
    ("file", "per_second", "expected"),
    [(LOOSE, 1.0, range(1, 3)), (TIGHT, 20.0, range(3, 30)), (LOOSE, 20.0, range(2, 3))],
    ids=["a little load", "too much load", "targets that are always met"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_metric_has_the_number_of_a_plan_of_the_decision_log_of_the_same_requests(
    file: str, per_second: float, expected: range, seed: int, tmp_path: Path
) -> None:
    config = a_config(file)
    fleet = a_fleet(config, Machine(EVEN, kv_tokens=65_536, running=24))
    coming = ready(config, fleet, arrivals(150, per_second=per_second, seed=seed))
    needed = run_virtually(needed_after(config, fleet, coming, tmp_path / "log"))
    (pool,) = plan_of(read_logs([tmp_path / "log"])).pools
    assert needed == {pool.pool: pool.needed}
    assert pool.needed in expected


def test_where_no_load_is_low_enough_there_is_no_number(tmp_path: Path) -> None:
    config = a_config(IMPOSSIBLE)
    fleet = a_fleet(config, Machine(EVEN))
    coming = ready(config, fleet, arrivals(40, per_second=4.0))
    needed = run_virtually(needed_after(config, fleet, coming, tmp_path / "log"))
    (pool,) = plan_of(read_logs([tmp_path / "log"])).pools
    assert pool.needed is None
    assert math.isnan(needed["own"])


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 50_000.0

    def __call__(self) -> float:
        return self.now


CLASS = ServiceClass("chat", 0, ttft_s=1.0, tpot_s=0.1)


def an_end(at_s: float, backend: str = "own-0", *, seconds: float = 4.0) -> Ended:
    """An answer of two pieces that began at `at_s` and came after a tenth of a second and at the end."""
    request = Request("r", "acme", "m", "acme", 100, 50, service_class="chat", promised=CLASS, block_keys=(1,) * 64)
    flight = Flight(backend, request, 100, at_s, Ahead(), 1, 1, 0.1, True, Flights(), lambda _: None)
    flight.book.begin(flight)
    for heard_s in (at_s + 0.1, at_s + seconds):
        flight.heard(Delta(token_ids=(1,) * 25), heard_s)
    view = ClusterView((BackendView(backend, "own", "shard", frozenset()),), 0.0)
    made = Made(at_s, Decision(backend, "p", scores=((backend, 1.0),)), view, flight)
    ends = {"ended_at": at_s + seconds, "outcome": "finished", "code": "finished"}
    return Ended(request, 1, "v1", arrived_at=at_s, arrived_unix_s=at_s, made=(made,), **ends)  # type: ignore[arg-type]


def test_a_request_is_kept_as_the_log_has_it_without_keys_and_views() -> None:
    whole, brief = record_of(an_end(1.0)), record_of(an_end(1.0), is_brief=True)
    (tried,) = whole.tries
    few = msgspec.structs.replace(tried, seen=(), scores=(), backends=0, speed=None)
    assert brief == msgspec.structs.replace(whole, keys="", tries=(few,))
    assert whole.keys


def served(recent: RecentRequests, clock: Clock, count: int, *, gap_s: float = 1.0) -> None:
    """`count` answers, the last of which ends now."""
    for number in range(count):
        recent.put(an_end(clock.now - 4.0 - gap_s * (count - 1 - number), f"own-{number % 2}"))


def test_a_pool_without_recent_requests_needs_none_and_stays_in_the_metric() -> None:
    clock = Clock()
    recent = RecentRequests(clock, clock)
    recent.needed()
    served(recent, clock, 60)
    clock.now += SAME_FOR_S
    assert recent.needed()["own"] >= 1
    for _ in range(8):
        clock.now += READ_WITHIN_S - 1
        assert recent.needed() == {"own": 0.0}
    assert clock.now > 50_000 + KEPT_S


def test_a_quiet_time_after_a_rush_is_measured_against_the_load_of_the_rush() -> None:
    clock = Clock()
    recent = RecentRequests(clock, clock)
    recent.needed()
    # forty at once on two backends, all in time
    served(recent, clock, 400, gap_s=0.1)
    clock.now += SAME_FOR_S
    rush = recent.needed()["own"]
    clock.now += RECENT_S
    recent.needed()
    clock.now += RECENT_S
    served(recent, clock, 100, gap_s=2.0)
    assert (rush, recent.needed()["own"]) == (2.0, 1.0)


def test_requests_are_kept_only_while_the_metric_is_read() -> None:
    clock = Clock()
    recent = RecentRequests(clock, clock)
    assert clock() >= recent.read_until
    recent.needed()
    assert clock() < recent.read_until
    served(recent, clock, 60)
    clock.now += SAME_FOR_S
    assert recent.needed()
    clock.now += READ_WITHIN_S
    assert clock() >= recent.read_until
    assert recent.needed() == {}


def test_a_prompt_is_traced_for_the_metric_only_after_it_was_read() -> None:
    telemetry = Telemetry()
    with telemetry.account("r") as account:
        account.rule = 1
        assert telemetry.prompt(account, config_version="1") is None
        assert not account.wants_prompts
        needed_in(telemetry)
        assert telemetry.prompt(account, config_version="1") is not None
    assert telemetry.account("r").wants_prompts


def test_the_oldest_requests_make_room() -> None:
    clock = Clock()
    recent = RecentRequests(clock, clock)
    recent.needed()
    for _ in range(MOST_KEPT + 5):
        recent.put(an_end(clock.now))
    assert repr(recent) == f"<RecentRequests {MOST_KEPT}>"


def test_several_readers_cost_one_computation() -> None:
    clock = Clock()
    recent = RecentRequests(clock, clock)
    assert recent.needed() == {}
    served(recent, clock, 60)
    assert recent.needed() == {}
    clock.now += SAME_FOR_S
    assert recent.needed()["own"] >= 1
