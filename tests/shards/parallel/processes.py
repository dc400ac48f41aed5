"""Several parts of a network in processes of their own, joined by gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from shards.parallel.collectives import Collectives, join, meeting_point

WAITS_S = 60.0


def in_processes(size: int, compute: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `compute(group, *arguments)` returns in each of `size` new processes, in which all parts draw."""
    point = meeting_point(size, waits_s=WAITS_S)
    with ProcessPoolExecutor(size, get_context("spawn")) as pool:
        running = [pool.submit(_run, rank, size, point.port, compute, arguments) for rank in range(size)]
        return [each.result() for each in running]


def _run(rank: int, size: int, port: int, compute: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    store = join(port, size, waits_s=WAITS_S)
    return compute(Collectives.gloo(store, rank, size, draws_everywhere=True, waits_s=WAITS_S), *arguments)
