"""A whole simulation: sends arrivals through the router's own pipeline to simulated backends, until all have ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backends.base import CacheListener
from policies.errors import ExpectedError
from policies.sla.config import Config
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.operate.telemetry.decision_log import DecisionLog
from router.shared.store.memory import MemoryStore
from router.start.build import build
from simulation.arrivals import Arrival
from simulation.backend import SimulatedBackend
from simulation.changes import Change, Joining
from simulation.client import Call, Listening, SimulatedCaller
from simulation.engine import Work
from simulation.fleet import Fleet, with_named_keys
from simulation.virtual_time import run_virtually

Progress = Callable[[int, float], None]
"""Called with the number of calls that have ended, and the clock in seconds."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend after the simulation: its name, its pool, and its engine's totals."""

    name: str
    pool: str
    work: Work


@dataclass(frozen=True, slots=True)
class Run:
    """The results: one Call for each arrival, in their order; the backends; the number of tries of each step of
    `on_miss`, by class and step; and the simulated seconds.
    """

    config: Config
    fleet: Fleet
    calls: Sequence[Call]
    backends: Sequence[Backend]
    steps: dict[tuple[str, str], int]
    seconds: float


def simulate(
    config: Config,
    fleet: Fleet,
    arrivals: Sequence[Arrival],
    *,
    seed: int = 0,
    changes: Sequence[Change] = (),
    on_progress: Progress = lambda *_: None,
    log: Path | None = None,
) -> Run:
    """Simulate `config` on `arrivals`, which are settled and in order of time, with the backends of `fleet`.

    `changes` happen to backends meanwhile; those after the last request's end do not happen. The router's decision log
    is written to `log`, if there is one. Its times begin at 0. Raises ConfigError if it cannot be written.

    Pure but for `on_progress` and `log`: the same arguments give the same Run.
    """
    return run_virtually(_run(with_named_keys(config), fleet, arrivals, seed, changes, on_progress, log))


async def _run(
    config: Config,
    fleet: Fleet,
    arrivals: Sequence[Arrival],
    seed: int,
    changes: Sequence[Change],
    on_progress: Progress,
    log: Path | None,
) -> Run:
    clock = asyncio.get_running_loop().time
    made: list[SimulatedBackend] = []

    def make(listener: CacheListener) -> list[SimulatedBackend]:
        made.extend(fleet.backends(config, listener, clock))
        return made

    operations = build(
        config,
        backends=make,
        clock=clock,
        unix_time=clock,
        rng=random.Random(seed),
        quotas=MemoryStore(clock),
    )
    gateway = operations.gateway
    if log is not None:
        # the virtual clock does not wait for the disk, and no line may be dropped
        operations.telemetry.decisions = DecisionLog(str(log), most_waiting=0)
        operations.telemetry.decisions.open()
    calls = {_id_of(arrival): Call(arrival) for arrival in arrivals}
    assert len(calls) == len(arrivals), "two arrivals have one id"
    listening = Listening(calls)
    operations.telemetry.listen(listening)
    absent = {change.backend for change in changes if isinstance(change, Joining)}
    for backend in made:
        backend.on_load = gateway.cluster.changed
        if backend.name not in absent:
            await gateway.cluster.probe(backend.name)
    changing = asyncio.create_task(_changed(gateway, made, changes))
    await _answered(gateway, calls, on_progress)
    changing.cancel()
    await asyncio.gather(changing, return_exceptions=True)
    if operations.telemetry.decisions is not None:
        operations.telemetry.decisions.close()
    for backend in made:
        backend.check()
        await backend.close()
    await gateway.tokenizers.close()
    gateway.check()
    worked = [Backend(backend.name, backend.pool, backend.engine.work) for backend in made]
    return Run(config, fleet, list(calls.values()), worked, listening.steps, clock())


async def _changed(gateway: Gateway, backends: Sequence[SimulatedBackend], changes: Sequence[Change]) -> None:
    """Let `changes` happen at their times."""
    by_name = {backend.name: backend for backend in backends}
    for change in sorted(changes, key=lambda change: change.at_s):
        await asyncio.sleep(change.at_s - gateway.clock())
        if isinstance(change, Joining):
            await gateway.cluster.probe(change.backend)
        else:
            by_name[change.backend].engine.slow_down(change.factor)


async def _answered(gateway: Gateway, calls: dict[str, Call], on_progress: Progress) -> None:
    """Send every call at its time; returns when the last one has ended."""
    clock, ended = gateway.clock, 0

    async def ask(id: str, call: Call) -> None:  # noqa: A002 - it is the call's id
        nonlocal ended
        # the call has recorded its outcome
        with suppress(ExpectedError):
            await serve(SimulatedCaller(id, call.arrival.tenant, call, clock), gateway)
        ended += 1
        on_progress(ended, clock())

    async with asyncio.TaskGroup() as group:
        for id, call in calls.items():  # noqa: A001
            wait_s = call.arrival.at_s - clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            group.create_task(ask(id, call))


def _id_of(arrival: Arrival) -> str:
    return arrival.id or f"{arrival.number:024x}"
