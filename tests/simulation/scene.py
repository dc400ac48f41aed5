"""Parts of tests of the simulation: small files, small machines, arrivals."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from policies.sla.config import Config
from policies.sla.parse import parse
from simulation.arrivals import Arrival, settled, usual_of
from simulation.changes import Change
from simulation.fleet import Fleet, fleet_of
from simulation.run import Run, simulate
from simulation.speed import Machine, Speed, machines_of

EVEN = Speed(step_s=0.01, token_s=1e-4, pair_s=1e-9, context_s=1e-8)
"""A machine that is easy to reason about: 10 ms a step, 10,000 tokens of prompts a second."""

POOL = "pools: {own: {kind: shard, at: ['a:1', 'a:2'], models: {m: m}}}\n"

TWO_CLASSES = """
classes:
  chat:  {ttft_p95: 500ms, tpot_p95: 100ms, weight: 4}
  batch: {deadline: 5m, preemptible: true}
tenants:
  acme: {keys: ["${env:A}"], weight: 3}
  labs: {keys: ["${env:L}"], limits: {requests_per_minute: 30}}
rules:
  - {when: {priority: batch}, class: batch}
  - {class: chat}
on_miss: {chat: [{queue: 2s}, {shed: 429}]}
"""


def a_config(text: str = "classes: {chat: {ttft_p95: 500ms}}\n") -> Config:
    """The parsed `text`, with two shards that serve the model m."""
    return parse(text + ("" if "pools:" in text else POOL), environment={"A": "a", "L": "l"})


def a_fleet(config: Config, machine: Machine | None = None, **counts: int) -> Fleet:
    """The backends of `config`, each of them `machine`, or what its pool usually is but of an even speed."""
    machines = machines_of(config, {})
    if machine is not None:
        machines = dict.fromkeys(machines, machine)
    return fleet_of(config, machines, counts=counts)


def arrivals(count: int, *, per_second: float, seed: int = 1, **fields: object) -> list[Arrival]:
    """`count` requests at random times; every third of them begins with the same chunk, the others are unlike."""
    rng, now_s, coming = random.Random(seed), 0.0, []
    usual: dict[str, object] = {"new_tokens": 20}
    for number in range(count):
        now_s += rng.expovariate(per_second)
        chunks = (1, 1000 + number % 4, number) if number % 3 == 0 else ()
        sizes = {"prompt_tokens": rng.randrange(1500, 2000)}
        coming.append(Arrival(number, round(now_s, 3), **{**usual, **sizes, "chunks": chunks, **fields}))  # type: ignore[arg-type]
    return coming


def simulated(
    config: Config,
    coming: Iterable[Arrival],
    *,
    fleet: Fleet | None = None,
    seed: int = 0,
    changes: Sequence[Change] = (),
) -> Run:
    """The simulation of `coming`, on machines of an even speed or on `fleet`, with `changes` of its backends."""
    fleet = fleet or a_fleet(config, Machine(EVEN))
    return simulate(config, fleet, ready(config, fleet, coming), seed=seed, changes=changes)


def ready(config: Config, fleet: Fleet, coming: Iterable[Arrival]) -> list[Arrival]:
    """`coming` with its tenants and models."""
    models: Sequence[str] = fleet.models(config)
    return [settled(arrival, config, models, usual_of(config, models)) for arrival in coming]


def written(path: Path, *lines: str) -> Path:
    """`path`, with these lines in it."""
    path.write_text("\n".join(lines) + "\n")
    return path
