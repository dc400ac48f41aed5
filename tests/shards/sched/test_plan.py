from __future__ import annotations

import random

import pytest

from shards.kv.keys import BLOCK_TOKENS
from shards.sched.cost import CostModel, StepShape, prefill_shape
from shards.sched.plan import StepLimits, Work, plan_step, shape_of
from shards.sched.ranks import BACKGROUND

LIMITS = StepLimits(step_s=0.05)


def a_cost(token_s: float = 1e-4, pair_s: float = 0.0) -> CostModel:
    return CostModel(prior=(1e-3, token_s, pair_s, 0.0))


def a_prompt(id: int, tokens: int, *, computed: int = 0, rank: int = 0, **more: object) -> Work:  # noqa: A002
    more = {"ready_tokens": tokens, "rest_tokens": tokens, **more}
    return Work(id, rank, arrival=id, computed_tokens=computed, is_decoding=False, **more)  # type: ignore[arg-type]


def a_decoding(id: int, context: int = 100) -> Work:  # noqa: A002
    return Work(id, 0, id, context, ready_tokens=1, rest_tokens=0, is_decoding=True)


def test_every_decoding_sequence_gets_its_token_whatever_the_time():
    plan = plan_step([a_decoding(i, 100_000) for i in range(64)], a_cost(token_s=1.0), LIMITS)
    assert plan == dict.fromkeys(range(64), 1)


def a_drafting(id: int, tokens: int, context: int = 100) -> Work:  # noqa: A002
    return a_decoding(id, context)._replace(drafted_tokens=tokens)


def test_drafts_are_verified_where_the_time_holds_them():
    assert plan_step([a_drafting(1, 5), a_decoding(2)], a_cost(), LIMITS) == {1: 6, 2: 1}


def test_drafts_are_cut_to_the_time_and_never_make_a_step_longer_than_it_should_be():
    work = [a_drafting(id, 16) for id in range(8)]  # noqa: A001
    cost = a_cost(token_s=1e-3)
    plan = plan_step(work, cost, LIMITS)
    assert all(plan.values())
    assert 8 < sum(plan.values()) < 8 * 17
    assert cost.predict_s(shape_of(work, plan)) <= LIMITS.step_s


def test_drafts_give_way_to_the_first_short_prompt_and_to_the_unit_of_a_long_one():
    cost = a_cost(token_s=7e-4)
    plan = plan_step([a_drafting(1, 16), a_prompt(2, 10), a_prompt(3, 100_000)], cost, LIMITS)
    assert plan == {1: 1, 2: 10, 3: BLOCK_TOKENS}


def test_where_decoding_alone_takes_longer_than_a_step_drafts_get_half_of_one_and_no_more_than_prefill_leaves():
    cost = CostModel(prior=(0.2, 5e-3, 0.0, 0.0))
    assert plan_step([a_drafting(1, 16), a_drafting(2, 16)], cost, LIMITS) == {1: 6, 2: 1}
    assert plan_step([a_drafting(1, 16), a_prompt(2, 3)], cost, LIMITS) == {1: 3, 2: 3}
    assert plan_step([a_drafting(1, 16), a_prompt(2, 1000)], cost, LIMITS) == {1: 1, 2: BLOCK_TOKENS}


def test_the_time_in_which_a_draft_is_guessed_counts_too():
    cost = CostModel(prior=(0.01, 0.001, 0.0, 0.0))
    limits = StepLimits(step_s=0.02)
    plain = a_decoding(1, 100)._replace(drafted_tokens=8)
    assert plan_step([plain], cost, limits) == {1: 9}
    assert plan_step([plain._replace(guess_s=0.002)], cost, limits) == {1: 4}


def test_a_drafted_token_costs_what_a_row_costs():
    work = [a_drafting(1, 3, 99)]
    assert shape_of(work, {1: 4}) == StepShape(4, 0.0, 400)


def test_nothing_to_do_is_an_empty_plan():
    assert plan_step([], a_cost(), LIMITS) == {}
    assert plan_step([a_prompt(1, 0)], a_cost(), LIMITS) == {}


def test_a_long_prompt_gets_what_the_time_holds():
    plan = plan_step([a_prompt(1, 100_000)], a_cost(token_s=1e-4), LIMITS)
    assert plan[1] % BLOCK_TOKENS == 0
    assert 350 <= plan[1] <= 490


def test_a_chunk_shrinks_with_the_context_before_it():
    cost = a_cost(pair_s=1e-8)
    near = plan_step([a_prompt(1, 100_000)], cost, LIMITS)[1]
    far = plan_step([a_prompt(1, 100_000, computed=128_000)], cost, LIMITS)[1]
    assert far < near / 4


def test_a_chunk_ends_on_a_block_boundary_or_with_the_prompt():
    assert plan_step([a_prompt(1, 1000, slice_tokens=200)], a_cost(token_s=0), LIMITS) == {1: 192}
    assert plan_step([a_prompt(1, 1000)], a_cost(token_s=0), LIMITS) == {1: 1000}


def test_a_slice_below_a_block_still_makes_progress():
    assert plan_step([a_prompt(1, 1000, slice_tokens=10)], a_cost(token_s=0), LIMITS) == {1: 64}


def test_a_short_prompt_does_not_wait_behind_long_ones():
    long = [a_prompt(i, 100_000) for i in range(20)]
    assert plan_step([*long, a_prompt(99, 70)], a_cost(), LIMITS)[99] == 70


def test_a_short_prompt_does_not_wait_even_when_the_lanes_cost_more_than_the_step():
    long = [a_prompt(i, 100_000) for i in range(8)]
    assert plan_step([*long, a_prompt(99, 20)], a_cost(token_s=1e-3), LIMITS)[99] == 20


def test_no_more_long_prompts_than_lanes_are_served_and_each_gets_a_block():
    plan = plan_step([a_prompt(i, 100_000) for i in range(20)], a_cost(token_s=9e-5), LIMITS)
    assert plan == dict.fromkeys(range(8), BLOCK_TOKENS)


def test_no_more_lanes_open_than_the_time_holds_and_one_always_does():
    prompts = [a_prompt(i, 100_000) for i in range(20)]
    assert plan_step(prompts, a_cost(token_s=2e-4), LIMITS) == dict.fromkeys(range(3), BLOCK_TOKENS)
    assert plan_step(prompts, a_cost(token_s=1.0), LIMITS) == {0: BLOCK_TOKENS}


def test_a_cheap_lane_does_not_open_past_one_for_which_the_time_is_short():
    cost = a_cost(token_s=1e-4, pair_s=3e-9)
    deep = [a_prompt(i, 100_000, computed=128_000) for i in (1, 2)]
    assert set(plan_step([*deep, a_prompt(3, 100_000)], cost, LIMITS)) == {1}


def test_chunks_end_at_multiples_of_the_unit():
    limits = StepLimits(unit_tokens=256)
    assert plan_step([a_prompt(1, 1000, computed=64)], a_cost(token_s=0), limits) == {1: 1000}
    assert plan_step([a_prompt(1, 10_000)], a_cost(token_s=1e-4), limits) == {1: 256}
    assert plan_step([a_prompt(1, 10_000, computed=64)], a_cost(token_s=1e-4), limits) == {1: 192 + 256}


def test_lanes_share_the_time_evenly():
    plan = plan_step([a_prompt(i, 100_000) for i in range(3)], a_cost(token_s=3e-5), LIMITS)
    assert max(plan.values()) - min(plan.values()) <= BLOCK_TOKENS


def test_a_better_rank_goes_first_and_a_worse_one_keeps_its_block():
    plan = plan_step([a_prompt(1, 100_000, rank=3), a_prompt(2, 100_000, rank=0)], a_cost(), LIMITS)
    assert plan[1] == BLOCK_TOKENS
    assert plan[2] > 3 * BLOCK_TOKENS


@pytest.mark.parametrize("drawing", [0, 1])
def test_background_prompts_add_a_quarter_to_the_time_of_better_ranks_that_decode_and_fill_a_step_otherwise(
    drawing: int,
) -> None:
    cost = CostModel(prior=(4e-3, 5e-6, 0.0, 1e-8))
    decoding = [a_decoding(id, 5_000)._replace(rank=drawing * BACKGROUND) for id in range(4)]  # noqa: A001
    prompts = [a_prompt(id, 3_000, rank=BACKGROUND, slice_tokens=256) for id in range(10, 14)]  # noqa: A001
    plan = plan_step([*decoding, *prompts], cost, LIMITS)
    alone_s = cost.predict_s(shape_of(decoding, dict.fromkeys(range(4), 1)))
    share = cost.predict_s(shape_of([*decoding, *prompts], plan)) / alone_s - 1.0
    if drawing:
        assert [plan[prompt.id] for prompt in prompts] == [256] * 4
    else:
        assert 0.15 < share <= 0.25
        assert plan[10] > 0


def test_one_unit_of_a_background_prompt_is_always_computed_and_a_short_one_is_cut_to_it() -> None:
    cost = a_cost(token_s=1e-4)
    plan = plan_step([a_decoding(1), a_prompt(2, 200, rank=BACKGROUND)], cost, LIMITS)
    assert plan == {1: 1, 2: BLOCK_TOKENS}


def test_drafts_of_better_ranks_have_a_whole_step_beside_background_prompts() -> None:
    cost = a_cost(token_s=1e-4)
    plan = plan_step([a_drafting(1, 16), a_prompt(2, 1000, rank=BACKGROUND)], cost, LIMITS)
    assert plan == {1: 17, 2: BLOCK_TOKENS}


def test_background_computes_nothing_beside_prompts_of_better_ranks():
    better, worse = a_prompt(1, 64), a_prompt(2, 64, rank=BACKGROUND)
    drawing = a_decoding(3)._replace(rank=BACKGROUND)
    work = [better, worse, drawing, a_decoding(4)]
    assert plan_step(work, a_cost(), StepLimits()).keys() == {1, 4}
    assert plan_step(work[1:], a_cost(), StepLimits()).keys() == {2, 3, 4}


def test_a_sequence_steps_back_if_another_computes_its_next_block():
    twins = [a_prompt(i, 1000, next_block="same", may_follow=True) for i in (1, 2, 3)]
    assert set(plan_step(twins, a_cost(), LIMITS)) == {1}


def test_a_sequence_that_may_not_follow_computes_the_block_itself():
    twins = [a_prompt(1, 64, next_block="same"), a_prompt(2, 64, next_block="same")]
    assert plan_step(twins, a_cost(), LIMITS) == {1: 64, 2: 64}


def test_the_batch_is_bounded_even_if_tokens_cost_nothing():
    limits = StepLimits(chunk_tokens=1024, batch_tokens=2048)
    plan = plan_step([a_prompt(i, 100_000) for i in range(4)], a_cost(token_s=0), limits)
    assert max(plan.values()) <= 1024
    assert sum(plan.values()) <= 2048


def test_the_shape_of_a_plan_counts_tokens_pairs_and_decode_context():
    work = [a_decoding(1, 99), a_prompt(2, 64, computed=128)]
    assert shape_of(work, {1: 1, 2: 64}) == prefill_shape(128, 64) + StepShape(1, 0.0, 100)


@pytest.mark.parametrize("seed", range(100))
def test_the_first_short_prompt_is_in_the_next_step_and_no_step_is_longer_than_its_bound(seed):
    rng = random.Random(seed)
    cost = a_cost(token_s=rng.choice([1e-5, 1e-4, 1e-3]), pair_s=rng.choice([0.0, 1e-9, 1e-8]))
    decoding = [
        a_drafting(1000 + i, rng.choice([0, 0, 1, 16]), rng.randint(1, 10_000)) for i in range(rng.randint(0, 64))
    ]
    prompts = [
        a_prompt(i, rng.choice([5, 20, 1000, 100_000]), computed=64 * rng.randint(0, 2000), rank=rng.randint(0, 2))
        for i in range(rng.randint(1, 30))
    ]
    work = [*decoding, *prompts]
    rng.shuffle(work)
    plan = plan_step(work, cost, LIMITS)
    prompts.sort(key=lambda prompt: (prompt.rank, prompt.arrival))
    costs = {
        prompt.id: cost.marginal_s(prefill_shape(prompt.computed_tokens, prompt.ready_tokens)) for prompt in prompts
    }
    short = [
        prompt
        for prompt in prompts
        if costs[prompt.id] <= LIMITS.step_s / 2 and prompt.ready_tokens <= LIMITS.chunk_tokens
    ]
    long = [prompt for prompt in prompts if prompt not in short]
    if short:
        assert plan[short[0].id] == short[0].ready_tokens
    decode_s = cost.predict_s(shape_of(decoding, dict.fromkeys([sequence.id for sequence in decoding], 1)))
    unit_s = cost.marginal_s(prefill_shape(long[0].computed_tokens, BLOCK_TOKENS)) if long else 0.0
    bound_s = max(LIMITS.step_s, decode_s + unit_s + LIMITS.step_s / 2)
    assert cost.predict_s(shape_of(work, plan)) <= bound_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_every_request_finishes_and_short_ones_soon(seed):
    rng = random.Random(seed)
    limits = StepLimits(lanes=rng.choice([1, 2, 8]))
    cost = a_cost(token_s=rng.choice([0.0, 1e-4, 1e-2]))
    left = {i: rng.choice([1, 63, 64, 500, 5000]) for i in range(12)}
    done = dict.fromkeys(left, 0)
    ranks = {i: rng.randint(0, 2) for i in left}
    twin_of = {i: rng.choice([i, 0, 1]) for i in left}
    for _ in range(5000):
        if not left:
            return
        work = [
            a_prompt(
                i,
                tokens,
                computed=done[i],
                rank=ranks[i],
                next_block=(twin_of[i], done[i]),
                may_follow=tokens > BLOCK_TOKENS,
            )
            for i, tokens in left.items()
        ]
        plan = plan_step(work, cost, limits)
        assert plan, "a step with work always computes some"
        for i, tokens in plan.items():
            assert tokens == left[i] or tokens % BLOCK_TOKENS == 0
            done[i] += tokens
            left[i] -= tokens
            if not left[i]:
                del left[i]
    pytest.fail(f"still {left}")
