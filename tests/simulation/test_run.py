"""A whole simulation: every arrival ends once, and queues are as long as theory says."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from policies.nouns import Outcome
from simulation.arrivals import Arrival
from simulation.changes import Joining, Slowdown
from simulation.speed import Machine, Speed
from simulation.summary import summary_of
from tests.simulation.scene import EVEN, TWO_CLASSES, a_config, a_fleet, arrivals, simulated

SMALL = Machine(EVEN, kv_tokens=8192, running=4, context_tokens=4096)


@settings(max_examples=12, deadline=None)
@given(
    sizes=some.lists(some.tuples(some.integers(1, 6000), some.integers(1, 200)), min_size=1, max_size=40),
    seed=some.integers(0, 2**32),
    is_quick=some.booleans(),
)
def test_every_arrival_ends_exactly_once(sizes: list[tuple[int, int]], seed: int, is_quick: bool) -> None:
    rng, config = random.Random(seed), a_config(TWO_CLASSES)
    coming = [
        Arrival(
            number,
            rng.uniform(0.0, 2.0 if is_quick else 60.0),
            prompt,
            new,
            chunks=tuple(rng.randrange(3) for _ in range(prompt // 512)),
            tenant=rng.choice(("acme", "labs")),
            priority=rng.choice((None, "batch")),
            deadline_s=rng.choice((None, 0.05, 2.0)),
        )
        for number, (prompt, new) in enumerate(sizes)
    ]
    coming.sort(key=lambda arrival: arrival.at_s)
    # a request that is lost, ends twice or leaves a block behind fails the checks that end every simulation
    run = simulated(config, coming, fleet=a_fleet(config, SMALL))
    assert [call.arrival.number for call in run.calls] == [arrival.number for arrival in coming]
    assert all(call.outcome is not None for call in run.calls)
    for call in run.calls:
        if call.outcome is Outcome.FINISHED:
            assert call.usage.completion_tokens == call.arrival.new_tokens
            assert call.usage.prompt_tokens == call.arrival.prompt_tokens
    drawn = sum(backend.work.drawn_tokens for backend in run.backends)
    assert drawn >= sum(call.usage.completion_tokens for call in run.calls)


def test_a_machine_that_is_alone_and_idle_takes_what_its_speed_says() -> None:
    config = a_config()
    (call,) = simulated(config, [Arrival(0, 0.0, 1000, 11)]).calls
    prefill_s = 1000 * EVEN.token_s + EVEN.pair_s * 1000**2 / 2
    # two of the steps of 50 ms have room for a thousand tokens, and then some
    steps = math.ceil(prefill_s / 0.04)
    assert call.ttft_s == pytest.approx(prefill_s + steps * EVEN.step_s, rel=1e-3)
    assert call.tpot_s == pytest.approx(EVEN.step_s + EVEN.context_s * 1005, rel=1e-3)


def test_what_waits_at_one_server_waits_as_long_as_in_an_m_d_1_queue() -> None:
    rho, service_s, count = 0.5, 1.0, 1000
    rng, now_s, coming = random.Random(5), 0.0, []
    for number in range(count):
        now_s += rng.expovariate(rho / service_s)
        coming.append(Arrival(number, now_s, 8, 1))
    config = a_config("pools: {own: {kind: shard, at: ['a:1'], models: {m: m}}}\n")
    machine = Machine(Speed(step_s=service_s, token_s=0.0, pair_s=0.0, context_s=0.0), running=1)
    run = simulated(config, coming, fleet=a_fleet(config, machine))
    waits = [call.ttft_s - service_s for call in run.calls if call.ttft_s is not None]
    # Lindley (1952): each waits for what is left of the one before; the router notices within 2 ms that it has ended
    expected = [0.0]
    for before, after in pairwise(coming):
        expected.append(max(0.0, expected[-1] + service_s - (after.at_s - before.at_s)))
    assert waits == [pytest.approx(wait_s, abs=0.1) for wait_s in expected]
    # Pollaczek and Khinchine: Poisson arrivals and equal services of D wait D rho / (2 (1 - rho)) on average, and a
    # thousand of them come within a quarter of that
    assert sum(waits) / count == pytest.approx(service_s * rho / (2 * (1 - rho)), rel=0.25)
    assert summary_of(run).backends[0].utilisation == pytest.approx(rho, rel=0.05)


def test_a_second_request_finds_the_prefix_where_it_is_cached() -> None:
    config = a_config()
    first = Arrival(0, 0.0, 2048, 5, chunks=(1, 2, 3, 4))
    again = [replace(first, number=number, at_s=2.0 * number) for number in range(1, 6)]
    run = simulated(config, [first, *again])
    assert len({call.backend for call in run.calls}) == 1
    assert [call.usage.cached_tokens for call in run.calls] == [0] + [1984] * 5


def test_the_cache_of_one_tenant_is_not_that_of_another() -> None:
    config = a_config(TWO_CLASSES)
    coming = [
        Arrival(number, 2.0 * number, 2048, 5, chunks=(1, 2, 3, 4), tenant=name)
        for number, name in enumerate(("acme", "labs"))
    ]
    assert [call.usage.cached_tokens for call in simulated(config, coming).calls] == [0, 0]


def test_a_tenant_gets_no_more_than_its_limits() -> None:
    config = a_config(TWO_CLASSES)
    run = simulated(config, arrivals(90, per_second=3.0, tenant="labs"))
    summary = summary_of(run)
    (labs,) = summary.tenants
    # a bucket of 30, and half a request a second for half a minute
    assert 40 <= labs.requests - labs.limited <= 50
    assert summary.classes[0].limited == labs.limited


def test_a_worse_rank_waits_for_a_better_one() -> None:
    config = a_config(TWO_CLASSES)
    chats = arrivals(60, per_second=4.0, tenant="acme")
    jobs = [
        replace(arrival, number=100 + arrival.number, priority="batch")
        for arrival in arrivals(60, per_second=6.0, seed=2, tenant="acme")
    ]
    fleet = a_fleet(config, SMALL)
    run = simulated(config, sorted([*chats, *jobs], key=lambda arrival: arrival.at_s), fleet=fleet)
    chat, batch = summary_of(run).classes
    assert chat.ttft_s is not None
    assert batch.ttft_s is not None
    assert chat.ttft_s.p95 < batch.ttft_s.p95 / 2


def test_a_file_that_turns_prompts_away_from_their_prefixes_shows_more_misses() -> None:
    good = a_config("classes: {chat: {ttft_p95: 500ms}}\n")
    worse = a_config("classes: {chat: {ttft_p95: 500ms}}\npolicies: {default: {score: {turn: 1}}}\n")
    # eight documents, of which each machine has room for six
    documents = [tuple(range(100 * at, 100 * at + 7)) for at in range(8)]
    coming = [
        replace(arrival, prompt_tokens=3700, chunks=documents[arrival.number * 5 % 8])
        for arrival in arrivals(120, per_second=5.0)
    ]
    fleet = a_fleet(good, Machine(EVEN, kv_tokens=6 * 3700))
    first, second = (summary_of(simulated(config, coming, fleet=fleet)) for config in (good, worse))
    assert first.classes[0].missed is not None
    assert second.classes[0].missed is not None
    assert first.classes[0].missed + 0.1 < second.classes[0].missed
    assert first.pools[0].hit_rate > second.pools[0].hit_rate + 0.1


def test_the_speed_of_a_pool_without_reports_is_learnt() -> None:
    config = a_config("pools: {far: {kind: openai_compatible, at: ['http://a:1', 'http://b:1'], model: m}}\n")
    run = simulated(config, arrivals(80, per_second=3.0), fleet=a_fleet(config))
    assert all(call.outcome is Outcome.FINISHED for call in run.calls)
    assert summary_of(run).pools[0].hit_rate > 0.1


def test_the_same_seed_gives_the_same_end_and_the_machine_does_not_matter() -> None:
    config = a_config(TWO_CLASSES)
    coming = arrivals(80, per_second=10.0, tenant="acme")
    first, again = (summary_of(simulated(config, coming, seed=5)) for _ in range(2))
    assert first == again


def test_a_backend_that_slows_down_takes_longer_from_then_on() -> None:
    config = a_config()
    coming = arrivals(60, per_second=10)
    fleet = a_fleet(config, Machine(EVEN), own=1)
    usual = simulated(config, coming, fleet=fleet)
    slow = simulated(config, coming, fleet=fleet, changes=(Slowdown(3.0, "own-0", 3.0),))
    for before, after in zip(usual.calls, slow.calls, strict=True):
        assert before.ended_s is not None
        assert after.ended_s is not None
        assert (before.ended_s == after.ended_s) == (before.ended_s < 3.0) or before.ended_s > 2.5
    assert slow.backends[0].work.busy_s > 1.5 * usual.backends[0].work.busy_s


def test_a_backend_gets_requests_only_after_it_joined() -> None:
    config = a_config()
    run = simulated(config, arrivals(60, per_second=10), changes=(Joining(3.0, "own-1"), Joining(1e6, "own-0")))
    assert all(call.outcome is Outcome.FINISHED for call in run.calls)
    assert {call.backend for call in run.calls} == {"own-1"}
    run = simulated(config, arrivals(60, per_second=10), changes=(Joining(3.0, "own-1"),))
    placed = [call.placed_s for call in run.calls if call.backend == "own-1"]
    assert placed
    assert min(placed_s for placed_s in placed if placed_s is not None) >= 3.0
