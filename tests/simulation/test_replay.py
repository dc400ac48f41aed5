"""A decision log comes again: the same file and cluster decide the same; a log that cannot be read is named."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from policies.errors import ExpectedError, InvalidRequest
from policies.sla.config import Config
from router.call.pipeline import serve
from router.operate.telemetry.decision_record import Record
from router.shared.store.memory import MemoryStore
from router.start.build import build
from simulation.arrivals import Arrival, sped_up
from simulation.client import Call, SimulatedCaller
from simulation.fleet import Fleet, with_named_keys
from simulation.replay import Then, agreement, read_log
from simulation.report import shown, tables
from simulation.speed import Machine
from simulation.summary import summary_of
from tests.simulation.scene import EVEN, TWO_CLASSES, a_config, a_fleet, arrivals, ready, simulated, written
from tests.virtual_time import run_virtually

CHUNKS = 512
FILE = TWO_CLASSES.replace("{requests_per_minute: 30}", "{}")


async def served_and_logged(config: Config, fleet: Fleet, coming: list[Arrival], log: Path) -> None:
    """Serve `coming` with a router that writes `log`, as `pointsman serve --decisions` does."""
    clock = asyncio.get_running_loop().time
    keyed = with_named_keys(config)
    keyed = replace(keyed, server=replace(keyed.server, decision_log=str(log)))
    gateway = build(
        keyed,
        backends=lambda listener: fleet.backends(keyed, listener, clock),
        clock=clock,
        unix_time=lambda: 1.7e9 + clock(),
        rng=random.Random(0),
        quotas=MemoryStore(clock),
    ).gateway
    decisions = gateway.observer.decisions
    assert decisions is not None
    decisions.open()
    for backend in (gateway.cluster.backend(name) for name in ("own-0", "own-1")):
        backend.on_load = gateway.cluster.changed  # type: ignore[attr-defined]
        await gateway.cluster.probe(backend.name)

    async def ask(arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at_s)
        with suppress(ExpectedError):
            await serve(SimulatedCaller(f"call-{arrival.number}", arrival.tenant, Call(arrival), clock), gateway)

    await asyncio.gather(*map(ask, coming))
    decisions.close()
    await gateway.tokenizers.close()


def a_log(path: Path, config: Config, fleet: Fleet) -> Path:
    """A log of chats and batch jobs, some of which were turned away."""
    chats = arrivals(60, per_second=16.0, tenant="acme", max_new_tokens=64)
    jobs = arrivals(40, per_second=10.0, seed=2, tenant="labs", priority="batch")
    both = sorted([*chats, *(replace(job, number=100 + job.number) for job in jobs)], key=lambda arrival: arrival.at_s)
    # the first call is at 0, where the replay begins
    both[0] = replace(both[0], at_s=0.0)
    run_virtually(served_and_logged(config, fleet, ready(config, fleet, both), path))
    return path


def test_the_same_file_and_cluster_decide_as_they_did_when_it_was_logged(tmp_path: Path) -> None:
    config = a_config(FILE)
    fleet = a_fleet(config, Machine(EVEN, kv_tokens=32_768, running=6))
    log = read_log(a_log(tmp_path / "log", config, fleet))
    found = agreement(simulated(config, sped_up(log.arrivals, 1.0), fleet=fleet).calls, log.then)
    assert found.requests == 100
    assert len({then.backend for then in log.then.values()}) == 3, "two backends, and none for shed requests"
    assert (found.same_class, found.same_backend) == (100, 100)


def test_a_log_keeps_tenants_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    config = a_config(FILE)
    fleet = a_fleet(config, Machine(EVEN))
    log = read_log(a_log(tmp_path / "log", config, fleet))
    assert {arrival.tenant for arrival in log.arrivals} == {"acme", "labs"}
    assert {arrival.max_new_tokens for arrival in log.arrivals if arrival.tenant == "acme"} == {64}
    assert {arrival.new_tokens for arrival in log.arrivals} == {20}
    alike = [
        arrival for arrival in log.arrivals if arrival.chunks and arrival.tenant == "acme" and arrival.number % 3 == 0
    ]
    assert alike
    assert all(len(arrival.chunks) == arrival.prompt_tokens // CHUNKS for arrival in log.arrivals)


def a_record(**fields: object) -> str:
    usual = {
        "version": 1,
        "time": 5.0,
        "request": "r",
        "tenant": "acme",
        "domain": "acme",
        "model": "m",
        "service_class": "chat",
        "rank": 0,
        "rule": 1,
        "config": "c",
        "prompt_tokens": 10,
        "max_new_tokens": 100,
        "outcome": "finished",
        "code": "finished",
        "seconds": 1.0,
    }
    return msgspec.json.encode(msgspec.convert({**usual, **fields}, Record)).decode()


def test_an_answer_that_never_came_is_as_long_as_those_of_its_class(tmp_path: Path) -> None:
    shed = a_record(request="a", outcome="rejected", code="overloaded")
    lines = (shed, a_record(request="b", completion_tokens=30), a_record(request="c", completion_tokens=51))
    log = read_log(written(tmp_path / "log", *lines))
    assert [arrival.new_tokens for arrival in log.arrivals] == [40, 30, 51]
    assert log.then["a"] == Then("chat", None)


def test_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    log = read_log(written(tmp_path / "log", a_record(), a_record(request="s")[:50]))
    assert [arrival.id for arrival in log.arrivals] == ["r"]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (('{"timestamp": 0}',), "log:1: Object missing required field `version`"),
        ((a_record(), a_record(request="s").replace('"version":1', '"version":2')), "log:2: version 2 is not known"),
        ((a_record(keys="?"),), "line 1: keys are damaged"),
        ((a_record(choices=0),), "log:1: choices is 0; it must be 1 or more"),
        ((a_record(), a_record()), "has a request twice"),
        (("torn",), "has no decision"),
    ],
)
def test_what_is_no_decision_log_is_refused(tmp_path: Path, lines: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        read_log(written(tmp_path / "log", *lines))


def test_requests_that_cannot_be_judged_are_counted_and_spend_is_money_in_a_currency(
    tmp_path: Path,
) -> None:
    config = a_config(FILE + "cost: {currency: USD, uncached: 2, cached: 1, output: 4}\n")
    known = {"tenant": next(iter(config.tenants)), "service_class": next(iter(config.classes))}
    lines = (a_record(**known), a_record(**known, request="r1", completion_tokens=4))
    log = read_log(written(tmp_path / "log", *lines))
    assert log.guessed == 1
    coming = [replace(arrival, model=None) for arrival in sped_up(log.arrivals, 1.0)]
    summary = summary_of(simulated(config, coming), guessed=log.guessed)
    text = shown(tables(summary))
    assert "note  1 requests have no answer in the log" in text
    assert "note  2 prompts have no keys" in text
    assert " USD" in text
