"""Cost of the fair queue against a plain heap of the same size: push one, read the first eight, take the first.

The heap reads the first eight in its only way: it pops them and pushes back those that are not taken. It has one order,
and no tenants, classes, ages or corrections. Times are medians of alternating rounds.

    python benchmarks/fairness.py
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from collections.abc import Callable
from itertools import count, islice

from policies.fairness.queue import FairQueue
from policies.fairness.ticket import Ticket
from policies.nouns import ServiceClass

CLASSES = (
    ServiceClass("interactive", 0, weight=8),
    ServiceClass("long-rag", 1, weight=4),
    ServiceClass("batch", 2, floor=0.1),
)
LOOKS = 8


def tickets(tenants: int) -> Callable[[float], Ticket]:
    """Makes tickets of random classes and tenants; costs spread over four decades."""
    rng, numbers = random.Random(1), count()

    def make(now: float) -> Ticket:
        tenant, name = f"tenant-{rng.randrange(tenants)}", rng.choice(CLASSES).name
        return Ticket(f"r{next(numbers)}", tenant, name, 10 ** rng.uniform(-2, 2), now, tokens=1000)

    return make


def fair(waiting: int, tenants: int) -> Callable[[int], float]:
    """Seconds for some rounds of a fair queue with `waiting` tickets."""
    queue = FairQueue({service_class.name: service_class for service_class in CLASSES}, {}, 30.0)
    make, now = tickets(tenants), 0.0
    for _ in range(waiting):
        queue.push(make(now), now)

    def turns(number: int) -> float:
        nonlocal now
        now += 0.01
        fresh = [make(now) for _ in range(number)]
        started_s = time.perf_counter()
        for ticket in fresh:
            queue.push(ticket, now)
            first = list(islice(queue.order(now), LOOKS))
            queue.take(first[0].id, now)
        elapsed_s = time.perf_counter() - started_s
        queue.check()
        return elapsed_s

    return turns


def plain(waiting: int, tenants: int) -> Callable[[int], float]:
    """The same for a heap by cost."""
    make, heap, numbers = tickets(tenants), list[tuple[float, int, Ticket]](), count()
    for _ in range(waiting):
        ticket = make(0.0)
        heapq.heappush(heap, (ticket.cost_s, next(numbers), ticket))

    def turns(number: int) -> float:
        fresh = [make(0.0) for _ in range(number)]
        started_s = time.perf_counter()
        for ticket in fresh:
            heapq.heappush(heap, (ticket.cost_s, next(numbers), ticket))
            first = [heapq.heappop(heap) for _ in range(min(LOOKS, len(heap)))]
            for entry in first[1:]:
                heapq.heappush(heap, entry)
        return time.perf_counter() - started_s

    return turns


def measure(waiting: int, tenants: int, rounds: int, turns: int) -> dict[str, object]:
    """One row of the table."""
    sides = {"fair": fair(waiting, tenants), "heap": plain(waiting, tenants)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side(turns) / turns)
    fair_us, heap_us = (1e6 * statistics.median(times[name]) for name in ("fair", "heap"))
    return {
        "waiting": waiting,
        "tenants": tenants,
        "fair us": round(fair_us, 1),
        "heap us": round(heap_us, 1),
        "ratio": round(fair_us / heap_us, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [(10, 10), (1000, 1000), (10_000, 1000), (100_000, 1000), (100_000, 100_000)]
    rows = [measure(waiting, tenants, arguments.rounds, arguments.turns) for waiting, tenants in sizes]
    if arguments.json:
        print(json.dumps(rows))
        return
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0]}
    for cells in ({name: name for name in widths}, *rows):
        print("  ".join(str(cells[name]).rjust(width) for name, width in widths.items()))


if __name__ == "__main__":
    main()
