from __future__ import annotations

import random

import numpy as np
import pytest

from shards.exec.lookup import PromptIndex
from shards.exec.prompt_drafter import PromptDrafter


def a_drafter(prompt: list[int], *output: int) -> PromptDrafter:
    drafter = PromptDrafter(PromptIndex(np.array(prompt, dtype=np.uint32)))
    for token in output:
        drafter.note(token)
    return drafter


def mislead(drafter: PromptDrafter) -> None:
    """Three tokens of the prompt each time, then one that is nowhere."""
    for start in range(0, 90, 3):
        for token in (start, start + 1, start + 2, 1000 + start):
            drafter.note(token)


def test_it_guesses_what_came_behind_the_last_three_tokens():
    drafter = a_drafter([1, 2, 3, 4, 5, 6, 7], 2, 3, 4)
    assert drafter.has_guess
    assert drafter.draft(2) == (5, 6)


def test_the_last_tokens_of_the_prompt_and_the_first_ones_drawn_are_one_text():
    assert a_drafter([1, 2, 3, 4, 9, 1, 2], 3).draft(2) == (4, 9)


def test_it_finds_what_was_drawn_before_what_was_asked():
    assert a_drafter([1, 2, 3, 4], 1, 2, 3, 8, 1, 2, 3).draft(1) == (8,)


def test_a_match_that_reaches_what_was_drawn_last_begins_again():
    assert a_drafter([0], 5, 6, 7, 5, 6, 7).draft(7) == (5, 6, 7, 5, 6, 7, 5)


@pytest.mark.parametrize("prompt", [[], [1], [1, 2]])
def test_a_prompt_shorter_than_three_tokens_is_a_beginning_too(prompt):
    drafter = a_drafter(prompt, 4, 5, 6)
    assert not drafter.has_guess
    assert drafter.draft(3) == ()
    for token in (4, 5, 6):
        drafter.note(token)
    assert drafter.draft(2) == (4, 5)


def test_it_follows_a_match_as_long_as_it_holds():
    drafter = a_drafter([1, 2, 3, 4, 5, 6, 7, 8], 1, 2, 3)
    for token in (4, 5, 6):
        assert drafter.draft(1) == (token,)
        drafter.note(token)
    drafter.note(99)
    assert not drafter.has_guess


def test_trust_grows_with_right_guesses_and_falls_with_wrong_ones():
    prompt = list(range(100))
    drafter = a_drafter(prompt, 10, 11, 12)
    before = drafter.chance
    for token in range(13, 40):
        drafter.note(token)
    assert drafter.chance > 0.9 > before
    mislead(drafter)
    assert drafter.first.share < 0.1


def test_trust_comes_back_although_nothing_is_drafted():
    drafter = a_drafter(list(range(200)))
    mislead(drafter)
    for start in range(100, 160, 6):
        for token in (*range(start, start + 5), 900 + start):
            drafter.note(token)
    assert drafter.first.share > 0.5


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_is_what_following_it_token_by_token_gives(seed):
    rng = random.Random(seed)
    tokens = [rng.randint(0, 3) for _ in range(300)]
    drafter = a_drafter(tokens[:100])
    for token in tokens[100:]:
        drafter.note(token)
        if drafter.has_guess:
            draft = drafter.draft(8)
            assert len(draft) == 8
            # one that takes the draft for drawn and goes on agrees with it
            other = a_drafter(tokens[:100], *drafter._output)
            for drafted in draft:
                assert other.draft(1) == (drafted,)
                other.note(drafted)
