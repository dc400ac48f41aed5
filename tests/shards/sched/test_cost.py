from __future__ import annotations

import random

import pytest

from shards.sched.cost import CostModel, StepShape, prefill_shape

TRUE = (4e-3, 2e-4, 3e-9, 5e-8)


def a_duration(shape: StepShape) -> float:
    fixed, token, pair, decode = TRUE
    return fixed + token * shape.tokens + pair * shape.pairs + decode * shape.decode_context


def a_shape(rng: random.Random) -> StepShape:
    decoding = rng.randint(0, 64)
    shape = StepShape(decoding, 0.0, decoding * rng.randint(1, 4000))
    if rng.random() < 0.6:
        shape += prefill_shape(rng.randint(0, 100_000), rng.randint(1, 60) * 64)
    return shape


def test_before_any_measurement_it_reports_no_speed_and_still_predicts():
    cost = CostModel()
    assert cost.prefill_s_per_token == 0
    assert cost.predict_s(StepShape(64)) > 0


def test_it_learns_what_steps_cost():
    rng, cost = random.Random(1), CostModel()
    for _ in range(300):
        shape = a_shape(rng)
        cost.observe(shape, a_duration(shape) * rng.uniform(0.9, 1.1))
    for _ in range(50):
        shape = a_shape(rng)
        assert cost.predict_s(shape) == pytest.approx(a_duration(shape), rel=0.25)


def test_a_chunk_far_into_a_context_costs_more_than_one_at_its_beginning():
    rng, cost = random.Random(2), CostModel()
    for _ in range(200):
        shape = a_shape(rng)
        cost.observe(shape, a_duration(shape))
    assert cost.marginal_s(prefill_shape(500_000, 64)) > 4 * cost.marginal_s(prefill_shape(0, 64))


@pytest.mark.parametrize("fixed_s", [0.3e-3, 3e-3, 30e-3, 300e-3])
def test_a_few_steps_show_the_speed_of_a_machine_even_if_it_is_unusual(fixed_s):
    # the shares of a model of 8 billion parameters: of the prior nothing holds but about these
    def takes(shape: StepShape) -> float:
        return fixed_s * (1.0 + 0.01 * shape.tokens + 6e-7 * shape.pairs + 8e-6 * shape.decode_context)

    cost, shapes = CostModel(), []
    for tokens in (64, 256, 129, 64):
        shapes += [prefill_shape(0, tokens), *(StepShape(1, 0.0, tokens + drawn) for drawn in (1, 2, 3))]
    for shape in (*shapes, *(StepShape(1, 0.0, 500 + drawn) for drawn in range(40))):
        cost.observe(shape, takes(shape))
    for shape in (StepShape(1, 0.0, 600), prefill_shape(0, 64), prefill_shape(0, 300), prefill_shape(600, 64)):
        assert cost.predict_s(shape) == pytest.approx(takes(shape), rel=0.15)
    assert cost.most_share > 0.9


def test_one_outlier_does_not_spoil_it():
    cost = CostModel()
    for _ in range(50):
        cost.observe(StepShape(64), 0.010)
    cost.observe(StepShape(64), 60.0)
    assert cost.predict_s(StepShape(64)) < 0.05


@pytest.mark.parametrize(("took", "counts_as"), [(100.0, 4.0), (4.5, 4.0), (3.5, 3.5), (3.0, 3.0)])
def test_an_outlier_counts_as_four_times_the_expected_time(took, counts_as):
    def after(times: float) -> float:
        cost = CostModel()
        for _ in range(50):
            cost.observe(StepShape(64), 0.010)
        cost.observe(StepShape(64), times * cost.predict_s(StepShape(64)))
        return cost.predict_s(StepShape(64))

    assert after(took) == after(counts_as)
    assert after(took) != after(0.9 * counts_as)


def test_a_step_whose_time_was_counted_to_the_one_before_does_not_spoil_it():
    """As seen on a GPU: both took 42 ms, but the end of the first was noticed late. Then 126 steps without a prompt."""
    cost = CostModel()
    steps = [(1664, 0.0494), (1549, 0.0288), (1561, 0.0331), (1573, 0.0800), (1713, 0.0044), (318, 0.0108)]
    for tokens in range(64, 2048, 128):
        cost.observe(StepShape(tokens, 64.0 * tokens), 0.006 + 21e-6 * tokens)
    for tokens, took in steps:
        cost.observe(StepShape(tokens, 64.0 * tokens), took)
    for drawn in range(126):
        cost.observe(StepShape(64, 0.0, 8200 + 64 * drawn), 0.0071)
    assert 0.090 < cost.predict_s(StepShape(5760, 64.0 * 5760)) < 0.180


def test_no_cost_is_negative_whatever_is_observed():
    rng, cost = random.Random(3), CostModel()
    for _ in range(500):
        cost.observe(a_shape(rng), rng.choice([0.0, -1.0, rng.expovariate(20), 1e-9]))
        assert cost.predict_s(a_shape(rng)) >= 0
        assert cost.marginal_s(prefill_shape(10, 64)) >= 0


def test_the_less_steps_can_be_foreseen_the_more_room_is_left_for_that():
    rng, steady, shaky = random.Random(4), CostModel(), CostModel()
    for _ in range(400):
        shape = a_shape(rng)
        steady.observe(shape, a_duration(shape))
        shaky.observe(shape, a_duration(shape) * rng.uniform(0.8, 1.2))
    # also the model's own error counts, which is all that the steady one has
    assert 1.0 > steady.most_share > 0.88 > shaky.most_share > 0.75
    shapes = [a_shape(rng) for _ in range(400)]
    taken = [(a_duration(shape) * rng.uniform(0.8, 1.2), shaky.predict_s(shape)) for shape in shapes]
    late = sum(elapsed_s > planned_s for elapsed_s, planned_s in taken)
    assert sum(elapsed_s > planned_s / shaky.most_share for elapsed_s, planned_s in taken) < late / 3
