from __future__ import annotations

import random
from functools import partial

import pytest

from shards.sched.cost import CostModel
from shards.sched.forecast import Decoding, Pending, predict_ttft_s
from shards.sched.plan import StepLimits, Work, plan_step, shape_of
from tests.work import work_of

LIMITS = StepLimits(step_s=0.05)
IDLE = Decoding()
COST = CostModel(prior=(1e-3, 1e-4, 1e-9, 1e-7))


def a_pending(key: int, tokens: int, *, rank: int = 0, computed: int = 0, needs_slot: bool = False) -> Pending:
    return Pending(key, rank, key, computed, tokens, needs_slot)


def predicting(*pending: Pending, decoding: Decoding = IDLE, free_slots: int = 100) -> dict[object, float]:
    return predict_ttft_s(pending, decoding, cost=COST, limits=LIMITS, free_slots=free_slots)


def until_first_token_s(pending: list[Pending], decoding: int = 0) -> dict[int, float]:
    """Key -> seconds until its first token, by the planner's own steps."""
    done = {prompt.key: prompt.computed_tokens for prompt in pending}
    total = {prompt.key: prompt.computed_tokens + prompt.rest_tokens for prompt in pending}
    now_s, ends = 0.0, {}
    chats = [Work(-1 - i, 0, -1 - i, 2000, 1, 0, True) for i in range(decoding)]
    while len(ends) < len(pending):
        work = [
            Work(prompt.key, prompt.rank, prompt.arrival, done[prompt.key], left, left, False)
            for prompt in pending
            if (left := total[prompt.key] - done[prompt.key])
        ]
        plan = plan_step([*chats, *work], COST, LIMITS)
        now_s += COST.predict_s(shape_of([*chats, *work], plan))
        for prompt in work:
            done[prompt.id] += plan.get(prompt.id, 0)
            if done[prompt.id] == total[prompt.id]:
                ends[prompt.id] = now_s
    return ends


def test_alone_it_is_the_cost_of_the_prompt():
    assert predicting(a_pending(1, 100))[1] == pytest.approx(1e-3 + 100 * 1e-4, rel=0.01)


def test_a_short_prompt_waits_for_no_long_one_and_a_long_one_for_all_before_it():
    predicted = predicting(a_pending(1, 50_000), a_pending(2, 50_000), a_pending(3, 50))
    assert predicted[3] < 0.02
    assert predicted[2] > 1.9 * predicting(a_pending(2, 50_000))[2]


def test_a_better_rank_comes_before_and_what_is_computed_is_not_counted():
    predicted = predicting(a_pending(1, 50_000, rank=1), a_pending(2, 20_000, rank=0))
    assert predicted[2] < predicted[1]
    assert predicting(a_pending(1, 10_000, computed=40_000))[1] < predicting(a_pending(1, 50_000))[1] / 2


def test_decoding_takes_its_part_of_every_step():
    chats = Decoding(rows=64, context_tokens=64 * 4000)
    assert predicting(a_pending(1, 50_000), decoding=chats)[1] > 1.5 * predicting(a_pending(1, 50_000))[1]


def test_without_a_slot_it_waits_for_another_sequence_to_end():
    chats = Decoding(rows=2, context_tokens=200, steps_left=(500, 1000))
    waiting = [a_pending(key, 50, needs_slot=True) for key in range(4)]
    predicted = predicting(*waiting, decoding=chats, free_slots=1)
    step_s = 1e-3 + 2 * 1e-4 + 200 * 1e-7
    assert predicted[0] < 0.05
    assert [predicted[key] / step_s for key in (1, 2, 3)] == pytest.approx([500, 1000, 1500], rel=0.1)


def test_a_request_of_several_choices_draws_with_its_first():
    assert len(predicting(a_pending(1, 50), a_pending(1, 50))) == 1


@pytest.mark.parametrize("seed", range(20))
def test_it_foretells_what_the_planner_does(seed):
    rng = random.Random(seed)
    pending = [a_pending(key, rng.choice([50, 150, 3000, 20_000]), rank=rng.randint(0, 1)) for key in range(6)]
    chats = rng.choice([0, 16])
    predicted = predicting(*pending, decoding=Decoding(chats, chats * 2001))
    ends_s = until_first_token_s(pending, chats)
    for prompt in pending:
        # lanes of a worse rank move sooner than foretold, and cost the better one up to a quarter
        slack_s = 0.06 + 0.4 * ends_s[prompt.key]
        assert predicted[prompt.key] >= ends_s[prompt.key] - slack_s
        if prompt.rank == 0:
            assert predicted[prompt.key] <= ends_s[prompt.key] + slack_s


def test_it_is_cheap_for_many_waiting():
    few, many = (
        work_of(partial(predicting, *(a_pending(key, 1000 + key) for key in range(number)))) for number in (250, 1000)
    )
    assert many.lines < 6 * few.lines, "four times as many, and no more than a logarithm beside"
    assert len(predicting(*(a_pending(key, 1000 + key) for key in range(10_000)))) == 10_000
