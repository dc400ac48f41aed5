from __future__ import annotations

import random

import pytest

from shards.kv.extents import FreeBlocks


def test_a_first_run_is_consecutive():
    assert FreeBlocks(10).take(4) == [0, 1, 2, 3]


def test_a_growing_run_continues_behind_its_last_block():
    free = FreeBlocks(100)
    first = free.take(2)
    other = free.take(2)
    assert free.take(3, after=first[-1]) == [2, 3, 4]
    assert free.take(2, after=other[-1]) == [other[-1] + 1, other[-1] + 2]


def test_a_new_run_leaves_room_to_the_one_before_it():
    free = FreeBlocks(100)
    free.take(2)
    assert free.take(1)[0] > 40


def test_a_run_is_split_only_where_no_extent_holds_it():
    free = FreeBlocks(6)
    free.take(6)
    for block in (0, 1, 3, 5):
        free.give(block)
    assert sorted(free.take(4)) == [0, 1, 3, 5]


def test_more_than_is_free_is_refused_and_takes_nothing():
    free = FreeBlocks(3)
    with pytest.raises(IndexError, match="4 blocks are wanted"):
        free.take(4)
    assert len(free) == 3


@pytest.mark.parametrize("seed", range(20))
def test_no_id_is_lost_or_given_twice(seed):
    rng, free, taken = random.Random(seed), FreeBlocks(40), []
    for _ in range(200):
        if taken and rng.random() < 0.5:
            free.give(taken.pop(rng.randrange(len(taken))))
        else:
            count = rng.randint(0, min(5, len(free)))
            got = free.take(count, after=rng.choice([None, *taken]))
            assert len(got) == count
            taken += got
        free.check()
        assert sorted([*taken, *free.ids()]) == list(range(40))
        assert all((block in free) != (block in taken) for block in range(40))
