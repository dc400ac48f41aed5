import random

import pytest

from policies.prefix.capacity import CapacityModel


def test_near_is_a_hit_far_is_a_miss_and_the_capacity_is_even() -> None:
    model = CapacityModel(1000)
    assert model.p_hit(0) == 1.0
    assert model.p_hit(1000) == pytest.approx(0.5)
    assert model.p_hit(500) == pytest.approx(16 / 17)
    assert model.p_hit(10**9) < 1e-9
    assert "1000 blocks" in repr(model)


@pytest.mark.parametrize(("true", "first"), [(300, 4096), (50_000, 4096), (4096, 4096)])
def test_it_learns_a_capacity_from_hits_and_misses(true: int, first: int) -> None:
    rng, model = random.Random(1), CapacityModel(first)
    for _ in range(1500):
        distance = true * 2 ** rng.uniform(-4, 4)
        model.observe(distance, hit=distance < true)
    assert true / 1.6 < model.blocks < true * 1.6


def test_what_is_unsure_moves_it_less_and_nothing_moves_it_beyond_reason() -> None:
    sure, unsure = CapacityModel(100), CapacityModel(100)
    sure.observe(200, hit=True)
    unsure.observe(200, hit=True, weight=0.25)
    assert 100 < unsure.blocks < sure.blocks
    for _ in range(500):
        sure.observe(1, hit=False)
    assert sure.blocks >= 7.9
