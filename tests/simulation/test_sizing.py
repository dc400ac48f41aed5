"""The fewest backends that keep every target."""

from __future__ import annotations

import pytest

from policies.errors import InvalidRequest
from simulation.arrivals import Arrival
from simulation.sizing import Trial, find_backends
from simulation.speed import Machine, Speed
from tests.simulation.scene import a_config, a_fleet, ready

ONE_AT_A_TIME = Machine(Speed(step_s=1.0, token_s=0.0, pair_s=0.0, context_s=0.0), running=1)
"""It takes a second for each request."""

FILE = "classes: {chat: {ttft_p95: 1.1s}}\npools: {own: {kind: shard, at: ['a:1'], models: {m: m}}}\n"


def in_groups_of(size: int) -> list[Arrival]:
    return [Arrival(size * group + at, 2.0 * group, 8, 1) for group in range(6) for at in range(size)]


@pytest.mark.parametrize("needed", [1, 3, 5])
def test_as_many_are_found_as_requests_come_at_once(needed: int) -> None:
    config = a_config(FILE)
    fleet, trials = a_fleet(config, ONE_AT_A_TIME), list[Trial]()
    found = find_backends("own", config, fleet, ready(config, fleet, in_groups_of(needed)), on_trial=trials.append)
    assert found.backends == needed
    assert all(trial.summary.keeps is (trial.backends >= needed) for trial in trials)
    assert len({trial.backends for trial in trials}) == len(trials)


def test_fewer_than_the_file_has_may_be_enough() -> None:
    config = a_config(FILE)
    fleet = a_fleet(config, ONE_AT_A_TIME, own=16)
    assert find_backends("own", config, fleet, ready(config, fleet, in_groups_of(2))).backends == 2


def test_a_target_that_no_number_meets_is_reported() -> None:
    config = a_config(FILE.replace("1.1s", "900ms"))
    fleet = a_fleet(config, ONE_AT_A_TIME)
    with pytest.raises(InvalidRequest, match="256 backends in 'own' do not meet the targets of chat"):
        find_backends("own", config, fleet, ready(config, fleet, in_groups_of(1)))


def test_a_file_that_promises_nothing_needs_no_search() -> None:
    config = a_config(FILE.replace("ttft_p95: 1.1s", "weight: 1"))
    fleet = a_fleet(config, ONE_AT_A_TIME)
    with pytest.raises(InvalidRequest, match="has a target"):
        find_backends("own", config, fleet, ready(config, fleet, in_groups_of(1)))


def test_an_unknown_pool_is_reported() -> None:
    config = a_config(FILE)
    with pytest.raises(InvalidRequest, match=r"there is no pool 'onw' .did you mean 'own'"):
        find_backends("onw", config, a_fleet(config), [])
