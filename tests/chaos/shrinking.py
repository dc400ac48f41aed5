"""The smallest experiment that still breaks an invariant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.chaos.experiment import Times, run
from tests.chaos.faults import Fault
from tests.chaos.load import Shape
from tests.chaos.system import a_system

Experiment = tuple[tuple[Fault, ...], Times, Shape]
_SHORTEST_S = 0.5
_LEAST_PER_S = 3.0


def smaller(faults: tuple[Fault, ...], times: Times, shape: Shape) -> Iterator[Experiment]:
    """Experiments that are one step smaller: fewer faults, then shorter ones, then less load."""
    if len(faults) > 1:
        yield from (((fault,), times, shape) for fault in faults)
    if times.fault > _SHORTEST_S:
        yield faults, replace(times, fault=times.fault / 2), shape
    if shape.per_s > _LEAST_PER_S:
        yield faults, times, replace(shape, per_s=shape.per_s / 2)


async def shrunk(faults: tuple[Fault, ...], times: Times, shape: Shape, say: Callable[[str], None]) -> Experiment:
    """The smallest experiment found that breaks an invariant as this one did, each in a fresh system."""
    smallest = (faults, times, shape)
    while True:
        for candidate in smaller(*smallest):
            if await is_broken(*candidate, say):
                smallest = candidate
                break
        else:
            return smallest


async def is_broken(faults: tuple[Fault, ...], times: Times, shape: Shape, say: Callable[[str], None]) -> bool:
    """Whether this experiment breaks an invariant in a fresh system."""
    async with a_system(faults[0].plan) as system:
        result = await run(system, faults, times, shape)
    names = " + ".join(result.faults)
    say(f"shrinking: {names}, {times.fault:g} s, {shape.per_s:g}/s: {'broken' if result.violations else 'holds'}")
    return bool(result.violations)
