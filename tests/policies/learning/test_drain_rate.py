"""The rate at which a queue empties is learnt only while requests wait."""

import pytest

from policies.learning.drain_rate import DrainRate


def test_at_first_each_backend_is_taken_to_work_off_a_second_in_a_second() -> None:
    assert DrainRate().per_second(3) == pytest.approx(3.0)
    assert DrainRate().per_second(0) == pytest.approx(1.0)


def test_what_leaves_while_others_wait_sets_the_rate() -> None:
    rate = DrainRate()
    for second in range(200):
        rate.waited(float(second), backends=2)
        rate.left(6.0)
    assert rate.per_second(2) == pytest.approx(6.0, rel=0.15)
    assert rate.per_second(4) == pytest.approx(12.0, rel=0.15)


def test_idle_time_teaches_nothing() -> None:
    rate = DrainRate()
    rate.waited(0.0, backends=1)
    rate.left(1.0)
    rate.emptied(1.0)
    before = rate.per_second(1)
    rate.waited(5000.0, backends=1)
    assert rate.per_second(1) == before


def test_a_fleet_that_becomes_slower_is_believed_within_a_minute() -> None:
    rate = DrainRate()
    for second in range(100):
        rate.waited(float(second), backends=1)
        rate.left(4.0)
    for second in range(100, 160):
        rate.waited(float(second), backends=1)
        rate.left(1.0)
    assert rate.per_second(1) == pytest.approx(1.0, rel=0.5)


def test_the_rate_is_never_zero() -> None:
    rate = DrainRate()
    rate.waited(0.0, backends=5)
    rate.waited(1e6, backends=5)
    assert rate.per_second(5) > 0
