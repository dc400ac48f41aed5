"""The summary of a simulation: misses by the file's targets, shares by the tenants' payment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.nouns import Outcome, Usage
from policies.sla.config import Config
from simulation.arrivals import Arrival
from simulation.client import Call
from simulation.engine import Work
from simulation.run import Backend, Run
from simulation.summary import Summary, spread_of, summary_of
from tests.simulation.scene import TWO_CLASSES, a_config, a_fleet


def a_call(number: int, ttft_s: float | None = 0.1, *, code: str = "finished", **fields: object) -> Call:
    """A chat of acme: 100 tokens in, 11 out, 50 ms each."""
    answered = ttft_s is not None
    usual: dict[str, object] = {
        "tenant": "acme",
        "service_class": "chat",
        "backend": "own-0" if answered else None,
        "pool": "own" if answered else None,
        "placed_s": 10.02 if answered else None,
        "first_s": None if ttft_s is None else 10.0 + ttft_s,
        "last_s": None if ttft_s is None else 10.0 + ttft_s + 0.5,
        "ended_s": 10.0 + (ttft_s or 0.0) + 0.5,
        "outcome": Outcome.FINISHED if code == "finished" else Outcome.REJECTED,
        "code": code,
        "usage": Usage(100, 11, 40) if answered else Usage(),
    }
    return Call(Arrival(number, 10.0, 100, 11), **{**usual, **fields})  # type: ignore[arg-type]


def summarised(*calls: Call, config: Config | None = None) -> Summary:
    config = config or a_config(TWO_CLASSES)
    backends = [Backend("own-0", "own", Work(30.0, 300, 600, 400, 110, 1)), Backend("own-1", "own", Work())]
    return summary_of(Run(config, a_fleet(config), calls, backends, {("chat", "shed"): 2}, 60.0))


def test_quantiles_are_times_that_were_seen() -> None:
    spread = spread_of([None, *(at / 100 for at in range(1, 101))])
    assert spread is not None
    assert (spread.p50, spread.p95, spread.p99) == (0.5, 0.95, 0.99)
    assert spread_of([None]) is None


def test_late_and_refused_requests_have_missed_but_not_those_over_their_own_limit() -> None:
    calls = [a_call(0), a_call(1, 0.9), a_call(2, None, code="overloaded"), a_call(3, None, code="rate_limit_exceeded")]
    (chat,) = summarised(*calls).classes
    assert (chat.requests, chat.finished, chat.refused, chat.limited, chat.failed) == (4, 2, 1, 1, 0)
    assert chat.missed == pytest.approx(2 / 3, abs=1e-6)
    assert chat.keeps is False


@pytest.mark.parametrize(("late", "keeps"), [(5, True), (6, False)])
def test_a_target_of_95_percent_is_kept_by_95_of_a_hundred(late: int, keeps: bool) -> None:
    calls = [a_call(number, 0.9 if number < late else 0.1) for number in range(100)]
    summary = summarised(*calls)
    assert summary.classes[0].keeps is keeps
    assert summary.keeps is keeps


def test_answers_that_are_drawn_too_slowly_break_the_promise_too() -> None:
    (chat,) = summarised(a_call(0), a_call(1, last_s=12.0)).classes
    assert (chat.missed, chat.slow, chat.keeps) == (0.0, 0.5, False)
    assert chat.tpot_s is not None
    assert chat.tpot_s.p50 == pytest.approx(0.05)


def test_a_deadline_is_kept_by_a_whole_answer() -> None:
    calls = [a_call(number, service_class="batch", ended_s=10.0 + 200.0 * number) for number in range(3)]
    (batch,) = summarised(*calls, a_call(3, None, code="no_backend", service_class="batch")).classes
    assert batch.missed == 0.5
    assert (batch.tpot_target_s, batch.slow) == (None, None)


def test_shares_are_parts_of_what_all_tenants_spent() -> None:
    calls = [a_call(0), a_call(1, tenant="labs"), a_call(2, tenant="labs"), a_call(3, None, code="overloaded")]
    acme, labs = summarised(*calls).tenants
    # 60 uncached, 40 cached at a tenth, 11 drawn at four
    assert acme.spend == pytest.approx(60 + 4 + 44)
    assert labs.share == pytest.approx(2 / 3, abs=1e-6)
    assert (acme.refused, labs.requests) == (1, 2)


def test_a_pool_is_its_backends_together() -> None:
    summary = summarised(a_call(0), a_call(1, placed_s=10.04))
    (pool,), (first, second) = summary.pools, summary.backends
    assert (pool.backends, pool.requests, pool.preemptions) == (2, 2, 1)
    assert (first.utilisation, second.utilisation, pool.utilisation) == (0.5, 0.0, 0.25)
    assert pool.hit_rate == 0.4
    assert pool.queue_s == pytest.approx(0.03)


def test_a_clock_that_is_a_hair_early_makes_no_wait_below_zero() -> None:
    (pool,) = summarised(a_call(0, placed_s=10.0 - 1e-9)).pools
    assert str(pool.queue_s) == "0.0"


def test_without_promises_there_is_nothing_to_keep() -> None:
    config = a_config("classes: {chat: {weight: 1}}\n")
    (chat,) = summarised(replace(a_call(0, 99.0), tenant="local"), config=config).classes
    assert (chat.missed, chat.slow, chat.keeps) == (None, None, None)
