"""The table of faults, the pairs that are drawn of it, and the smaller experiments that a failure leads to."""

from __future__ import annotations

from collections import Counter

from tests.chaos.experiment import Times
from tests.chaos.faults import BY_NAME, FAULTS
from tests.chaos.load import Shape
from tests.chaos.pairs import draw, fits
from tests.chaos.shrinking import smaller


def test_every_fault_has_a_name_of_its_own_and_says_what_is_broken_and_what_the_router_does() -> None:
    assert len(BY_NAME) == len(FAULTS) >= 40
    assert all(fault.what and fault.behaviour for fault in FAULTS)


def test_a_seed_draws_the_same_pairs_of_faults_that_can_happen_at_once() -> None:
    pairs = list(draw(FAULTS, 20, 7))
    assert pairs == list(draw(FAULTS, 20, 7)) != list(draw(FAULTS, 20, 8))
    assert len(set(pairs)) == 20
    assert all(fits(*pair) for pair in pairs)
    assert max(Counter(fault for pair in pairs for fault in pair).values()) == 1


def test_two_faults_fit_if_they_break_two_parts_or_two_servers() -> None:
    killed, flaps, stopped = BY_NAME["server killed"], BY_NAME["server flaps"], BY_NAME["redis stopped"]
    assert fits(killed, flaps)
    assert fits(killed, stopped)
    assert not fits(stopped, BY_NAME["redis slow"])
    assert not fits(killed, BY_NAME["all servers killed"])
    assert not fits(killed, BY_NAME["shard killed"]), "there are two systems"


def test_a_router_that_is_started_again_finds_its_file_and_its_servers_as_they_were() -> None:
    for first, second in draw(FAULTS, 300, 1):
        # the first one begins before the second one, and ends after it
        assert second.part != "router" or first.part == "router"


def test_smaller_experiments_have_fewer_faults_less_time_or_less_load() -> None:
    pair = (BY_NAME["server killed"], BY_NAME["redis stopped"])
    sizes = [(len(faults), times.fault, shape.per_s) for faults, times, shape in smaller(pair, Times(), Shape())]
    assert sizes == [(1, 1.5, 20.0), (1, 1.5, 20.0), (2, 0.75, 20.0), (2, 1.5, 10.0)]
    assert not list(smaller(pair[:1], Times(fault=0.4), Shape(per_s=2.0)))
