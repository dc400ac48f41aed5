"""A sample takes every observation while few come, and a bounded number a second of many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.learning.sample import ObservationSample


def test_while_few_come_all_are_taken() -> None:
    sample = ObservationSample(per_s=10.0, burst=5.0)
    assert all(sample.takes(100.0 + 0.1 * number) for number in range(100))


def test_of_many_at_once_a_burst_is_taken_and_then_a_number_a_second() -> None:
    sample = ObservationSample(per_s=10.0, burst=5.0)
    assert sum(sample.takes(100.0) for _ in range(50)) == 5
    assert sum(sample.takes(100.0 + 0.01 * number) for number in range(1, 201)) == 20


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    sample = ObservationSample(per_s=10.0, burst=2.0)
    assert sample.takes(100.0)
    assert sample.takes(50.0)
    assert not sample.takes(50.0)
    assert sample.takes(50.1)


@given(st.lists(st.floats(0.0, 5.0), max_size=200), st.floats(1.0, 50.0), st.floats(1.0, 20.0))
def test_no_period_has_more_than_the_burst_and_its_share(waits: list[float], per_s: float, burst: float) -> None:
    sample, now, taken = ObservationSample(per_s=per_s, burst=burst), 0.0, []
    for wait in waits:
        now += wait
        if sample.takes(now):
            taken.append(now)
    for first, began in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + (taken[last] - began) * per_s + 1e-6
