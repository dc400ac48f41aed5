"""Several parts of a network in one process: a thread for each, joined by gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shards.parallel.collectives import Collectives, join, meeting_point

T = TypeVar("T")


def on_all(size: int, compute: Callable[[Collectives], T], *, draws_everywhere: bool = False) -> list[T]:
    """What `compute` returns in each of `size` parts."""
    point = meeting_point(size, waits_s=20.0)

    def run(rank: int) -> T:
        store = join(point.port, size, waits_s=20.0)
        return compute(Collectives.gloo(store, rank, size, draws_everywhere=draws_everywhere, waits_s=20.0))

    with ThreadPoolExecutor(size) as threads:
        return [running.result() for running in [threads.submit(run, rank) for rank in range(size)]]
