from __future__ import annotations

import itertools
import random

import pytest

from shards.sched.cost import CostModel, StepShape
from shards.sched.drafts import CAUTION, FEW_ROWS, LEAST_SHARE, DraftBounds, Prospect, draft_lengths


def a_cost(fixed_s: float = 0.02, token_s: float = 1e-3, position_s: float = 0.0) -> CostModel:
    return CostModel(prior=(fixed_s, token_s, 0.0, position_s))


def a_prospect(id: int = 1, first: float = 0.5, later: float = 0.9, most: int = 16, context: int = 100) -> Prospect:  # noqa: A002
    return Prospect(id, context, first, later, most)


def lengths(*prospects: Prospect, rows: int = 1, cost: CostModel | None = None) -> dict[int, int]:
    return draft_lengths(prospects, rows=rows, context_tokens=100 * rows, cost=cost or a_cost())


def test_one_sequence_alone_verifies_what_hides_behind_the_weights():
    assert lengths(a_prospect(first=0.98, later=0.99)) == {1: 16}


def test_a_doubtful_guess_is_shorter_and_a_hopeless_one_is_not_verified():
    assert 1 <= lengths(a_prospect(first=0.3, later=0.5))[1] <= 3
    assert lengths(a_prospect(first=0.02)) == {}


def test_guesses_that_take_time_are_fewer_and_none_where_they_take_as_much_as_a_step():
    free, dear, dearer = (
        lengths(a_prospect(first=0.8, later=0.8)._replace(guess_s=guess_s)) for guess_s in (0.0, 0.002, 0.02)
    )
    assert free[1] > dear[1] > 0
    assert dearer == {}


def test_many_rows_leave_little_to_gain():
    alone = lengths(a_prospect(later=0.8))[1]
    among_many = lengths(a_prospect(later=0.8), rows=64)
    assert among_many.get(1, 0) < alone
    # a token costs nearly all that a token takes there
    assert lengths(a_prospect(first=0.7), rows=64) == {}


def test_nothing_is_verified_where_a_token_costs_as_much_as_a_step():
    assert lengths(a_prospect(first=0.95), cost=a_cost(fixed_s=0.0)) == {}


def test_a_far_context_costs_more_and_shortens_drafts():
    near, far = (lengths(a_prospect(context=tokens), cost=a_cost(position_s=1e-8))[1] for tokens in (100, 100_000))
    assert far < near


def test_no_more_than_may_be():
    assert lengths(a_prospect(first=0.99, most=2), a_prospect(2, first=0.99, most=0)) == {1: 2}


def test_among_many_rows_a_doubtful_guess_is_not_verified_even_if_rows_are_estimated_as_free():
    free = a_cost(token_s=0.0)
    assert lengths(a_prospect(first=0.6), rows=64, cost=free) == {}
    assert lengths(a_prospect(first=0.95), rows=64, cost=free) != {}
    assert lengths(a_prospect(first=0.6), rows=8, cost=free) == {1: 16}


def test_tokens_that_are_estimated_as_free_are_bounded_too():
    assert lengths(a_prospect(), cost=a_cost(token_s=0.0)) == {1: 16}


@pytest.mark.parametrize("seed", range(30))
def test_no_other_lengths_give_more_tokens_per_second(seed):
    rng = random.Random(seed)
    cost = a_cost(rng.uniform(0, 0.05), rng.uniform(1e-4, 5e-3), rng.choice([0.0, 1e-6]))
    prospects = [
        a_prospect(id, rng.random(), rng.random(), most=rng.randint(0, 4), context=rng.randint(1, 5000))
        for id in range(3)  # noqa: A001
    ]
    rows = rng.randint(3, 20)
    least_s = LEAST_SHARE * max(0, 1 - FEW_ROWS / rows) / rows * cost.predict_s(StepShape(rows, 0.0, 100 * rows))

    def rate(counts: tuple[int, ...]) -> float:
        tokens, seconds = float(rows), cost.predict_s(StepShape(rows, 0.0, 100 * rows))
        for prospect, count in zip(prospects, counts, strict=True):
            tokens += sum(prospect.first * prospect.later**ahead for ahead in range(count))
            token_s = cost.marginal_s(StepShape(1, 0.0, prospect.computed_tokens + 1))
            seconds += count * CAUTION * max(token_s, least_s)
        return tokens / seconds

    chosen = draft_lengths(prospects, rows=rows, context_tokens=100 * rows, cost=cost)
    best = max(map(rate, itertools.product(*(range(prospect.most + 1) for prospect in prospects))))
    assert rate(tuple(chosen.get(prospect.id, 0) for prospect in prospects)) == pytest.approx(best)


def test_a_step_draws_no_more_tokens_than_its_device_can():
    prospects = [a_prospect(id=number, first=0.99, later=0.99) for number in range(4)]
    bounded = draft_lengths(prospects, rows=4, context_tokens=400, cost=a_cost(), bounds=DraftBounds(128, 10))
    assert sum(bounded.values()) == 6
    assert sum(lengths(*prospects, rows=4).values()) > 6
    assert draft_lengths(prospects, rows=4, context_tokens=400, cost=a_cost(), bounds=DraftBounds(128, 4)) == {}


def test_a_device_has_more_rows_that_are_nearly_free():
    cost, prospect = a_cost(token_s=1e-5), a_prospect(first=0.5, later=0.8)
    on_device = draft_lengths([prospect], rows=64, context_tokens=6400, cost=cost, bounds=DraftBounds(128, 1024))
    assert on_device.get(1, 0) > lengths(prospect, rows=64, cost=cost).get(1, 0)


def test_what_drafts_take_beside_their_step_must_be_gained_too():
    def with_overhead(overhead_s: float) -> dict[int, int]:
        return draft_lengths(
            [a_prospect(first=0.9, later=0.9)], rows=1, context_tokens=100, cost=a_cost(), overhead_s=overhead_s
        )

    assert with_overhead(0.0)
    assert with_overhead(0.01)
    assert with_overhead(1.0) == {}
