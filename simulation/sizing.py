"""Finds the number of backends that a pool needs: the fewest with which every class meets its targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.errors import InvalidRequest
from policies.sla.config import Config
from simulation.arrivals import Arrival
from simulation.fleet import Fleet, check_pool
from simulation.run import Progress, simulate
from simulation.summary import Summary, summary_of

MOST_BACKENDS = 256


@dataclass(frozen=True, slots=True)
class Trial:
    """A simulation with `backends` backends in the pool."""

    backends: int
    summary: Summary


def find_backends(
    pool: str,
    config: Config,
    fleet: Fleet,
    arrivals: Sequence[Arrival],
    *,
    seed: int = 0,
    on_trial: Callable[[Trial], None] = lambda _: None,
    on_progress: Progress = lambda *_: None,
) -> Trial:
    """The trial with the fewest backends in `pool` that meets every target, found by doubling and then bisecting.

    Assumes that more backends never miss a target that fewer meet. `on_trial` gets each trial. Raises InvalidRequest if
    the file has no targets, or if MOST_BACKENDS do not meet them.
    """
    check_pool(pool, config)
    tried: dict[int, Trial] = {}

    def keeps(count: int) -> bool:
        run = simulate(config, fleet.with_count(pool, count), arrivals, seed=seed, on_progress=on_progress)
        trial = tried[count] = Trial(count, summary_of(run))
        on_trial(trial)
        _check_promising(trial.summary)
        return trial.summary.keeps

    too_few, enough = 0, max(1, fleet.counts[pool])
    while not keeps(enough):
        if enough == MOST_BACKENDS:
            raise _hopeless(pool, tried[enough].summary)
        too_few, enough = enough, min(2 * enough, MOST_BACKENDS)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if keeps(middle):
            enough = middle
        else:
            too_few = middle
    return tried[enough]


def _check_promising(summary: Summary) -> None:
    if all(row.keeps is None for row in summary.classes):
        hint = "give a class that is used ttft_p95, tpot_p95 or deadline"
        raise InvalidRequest("no class that is used has a target, so one backend is enough", hint=hint)


def _hopeless(pool: str, summary: Summary) -> InvalidRequest:
    broken = ", ".join(row.name for row in summary.classes if row.keeps is False)
    hint = "check its speed, the other pools and the targets"
    return InvalidRequest(f"{MOST_BACKENDS} backends in '{pool}' do not meet the targets of {broken}", hint=hint)
