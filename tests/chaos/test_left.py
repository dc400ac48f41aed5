"""Objects that may be left after an experiment, and those that are left over."""

from __future__ import annotations

from collections import Counter

import pytest

from router.operate.plan.recent import MOST_KEPT
from tests.chaos.experiment import MORE_OBJECTS, objects_left
from tests.chaos.system import Held

LOGGED, VISIT = (f"router.operate.diagnose.logged.{name}" for name in ("LoggedRequest", "Visit"))


def held(processes: int = 1, **objects: int) -> Held:
    """With `objects`; of those of one class, `logged` and `visits` are the newest requests."""
    names = {"logged": LOGGED, "visits": VISIT, "flights": "router.fleet.cluster.flights.Flight"}
    counts = Counter({names[name]: count for name, count in objects.items()})
    return Held(processes, Counter(), counts, threads=0, descriptors=0, pooled=0, resident_mb=0.0)


def test_histories_of_a_fixed_length_may_fill_up_and_nothing_else_may_grow() -> None:
    assert not objects_left(held(flights=5), held(flights=5 + MORE_OBJECTS), 1000)
    assert objects_left(held(flights=5), held(flights=6 + MORE_OBJECTS), 1000) == {
        "router.fleet.cluster.flights.Flight": MORE_OBJECTS + 1
    }


def test_each_request_may_be_kept_once_with_its_visits() -> None:
    assert not objects_left(held(), held(logged=1000, visits=3000), 1000)
    assert objects_left(held(), held(logged=1001 + MORE_OBJECTS), 1000) == {LOGGED: 1001 + MORE_OBJECTS}
    assert objects_left(held(), held(visits=6001 + MORE_OBJECTS), 1000) == {VISIT: 6001 + MORE_OBJECTS}


@pytest.mark.parametrize("processes", [1, 2])
def test_requests_beyond_the_number_that_a_process_keeps_are_left_over(processes: int) -> None:
    most = processes * MOST_KEPT
    assert not objects_left(held(processes, logged=most - 50), held(processes, logged=most), 100)
    assert objects_left(held(processes, logged=most - 50), held(processes, logged=most + 1), 100) == {LOGGED: 51}
