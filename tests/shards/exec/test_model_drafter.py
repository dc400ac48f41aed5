from __future__ import annotations

import random

from shards.exec.model_drafter import MOST_LAG, DraftPace, ModelDrafter
from shards.exec.sampling import Sampler
from shards.kv.pool import BlockPool
from shards.kv.table import BlockTable
from shards.nouns import SamplingParams
from shards.sched.drafts import MOST_DRAFTED


def a_drafter(pace: DraftPace | None = None, *, prompt_tokens: int = 10, most_tokens: int = 1000) -> ModelDrafter:
    sampler = Sampler(SamplingParams(), seed=0, stop_token_ids=frozenset(), vocabulary=100)
    table = BlockTable(BlockPool(16, model="small"), "")
    table.grow(500)
    return ModelDrafter(pace or DraftPace(), sampler, table, prompt_tokens=prompt_tokens, most_tokens=most_tokens)


def test_it_can_guess_once_nearly_all_known_tokens_have_kv() -> None:
    drafter = a_drafter(prompt_tokens=100)
    assert (drafter.has_guess, drafter.is_behind) == (False, True)
    drafter.computed_tokens = 100 - MOST_LAG - 1
    assert (drafter.has_guess, drafter.is_behind) == (False, True)
    drafter.computed_tokens += 1
    assert (drafter.has_guess, drafter.is_behind) == (True, False)


def test_near_the_end_of_its_context_it_neither_guesses_nor_lags() -> None:
    drafter = a_drafter(prompt_tokens=100, most_tokens=101 + MOST_DRAFTED)
    assert drafter.is_behind
    drafter.note(1)
    assert (drafter.has_guess, drafter.is_behind, drafter.may_guess) == (False, False, False)


def test_kv_of_right_guesses_stays_except_for_the_last_which_was_not_read() -> None:
    drafter = a_drafter()
    drafter.guess([5, 6, 7])
    assert drafter.draft(2) == (5, 6)
    assert not drafter.lacks(3)
    for token, computed in ((5, 11), (6, 12), (7, 12), (8, 12)):
        drafter.note(token)
        assert drafter.computed_tokens == computed
    assert drafter.known_tokens == 14
    assert drafter.draft(1) == ()


def test_kv_behind_a_wrong_guess_does_not_count() -> None:
    drafter = a_drafter()
    drafter.guess([5, 6, 7, 8])
    drafter.note(5)
    drafter.note(9)
    assert (drafter.computed_tokens, drafter.known_tokens) == (11, 12)
    assert drafter.draft(2) == ()


def test_the_chance_follows_what_was_right_and_fades_without_guesses() -> None:
    rng = random.Random(1)
    drafter = a_drafter()
    prior = drafter.chance
    for _ in range(60):
        drafter.guess([1])
        drafter.note(1 if rng.random() < 0.2 else 2)
    learnt = drafter.chance
    assert learnt < 0.45 < prior == drafter.later_chance + (prior - learnt)
    for _ in range(300):
        drafter.note(1)
    assert learnt < drafter.chance < prior
    assert abs(drafter.chance - prior) < 0.05


def test_a_new_answer_begins_with_the_experience_of_all() -> None:
    pace = DraftPace()
    first = a_drafter(pace)
    for _ in range(20):
        first.guess([1])
        first.note(2)
    assert a_drafter(pace).chance < 0.15
    # answers without a guess let it fade
    for _ in range(200):
        a_drafter(pace).end()
    assert a_drafter(pace).chance > 0.6


def test_what_it_held_is_given_back_and_it_lags_then() -> None:
    drafter = a_drafter(prompt_tokens=100)
    drafter.guess([1, 2])
    drafter.check()
    drafter.release()
    assert (len(drafter.table), drafter.computed_tokens, drafter.is_behind) == (0, 0, True)
    assert drafter.draft(1) == ()
    drafter.end()
    assert not drafter.may_guess
