from __future__ import annotations

import random

import numpy as np
import pytest

from shards.exec.lookup import GRAM_TOKENS, PromptIndex


def an_index(tokens: list[int]) -> PromptIndex:
    return PromptIndex(np.array(tokens, dtype=np.uint32))


def test_it_finds_what_follows_the_last_time_that_three_tokens_stood():
    index = an_index([1, 2, 3, 70, 1, 2, 3, 80, 9])
    assert index.find((1, 2, 3)) == 7
    assert index.tokens[7] == 80


def test_what_nothing_follows_is_not_found():
    assert an_index([1, 2, 3]).find((1, 2, 3)) is None


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], [0, 0, 0]])
def test_a_prompt_without_a_gram_and_a_successor_finds_nothing(tokens):
    assert an_index(tokens).find((0, 0, 0)) is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_it_finds_is_there_and_it_misses_little(seed):
    rng = random.Random(seed)
    highest = rng.choice([3, 50, 2**32 - 1])
    tokens = [rng.randint(0, highest) for _ in range(rng.randint(0, 2000))]
    index = an_index(tokens)
    grams = [tuple(tokens[at : at + GRAM_TOKENS]) for at in range(len(tokens) - GRAM_TOKENS)]
    found = 0
    for first, second, third in grams:
        position = index.find((first, second, third))
        if position is not None:
            found += 1
            assert tokens[position - GRAM_TOKENS : position] == [first, second, third]
    assert found >= 0.6 * len(grams)
    assert index.find((highest + 1, 0, 0)) is None


def test_its_memory_is_in_proportion_to_the_prompt():
    index = an_index(list(range(200_000)))
    assert index.tokens.nbytes + index._places.nbytes <= 20 * 200_000
