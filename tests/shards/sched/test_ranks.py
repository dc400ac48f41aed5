from __future__ import annotations

from shards.sched.ranks import BACKGROUND, effective_rank


def test_a_rank_improves_by_one_for_each_period_of_waiting():
    assert [effective_rank(3, waited_s, 10.0) for waited_s in (0, 9.9, 10, 25, 30, 1e9)] == [3, 3, 2, 1, 0, 0]


def test_the_best_rank_stays_as_it_is():
    assert effective_rank(0, 1e9, 10.0) == 0
    assert effective_rank(-1, 1e9, 10.0) == -1


def test_background_never_improves():
    assert effective_rank(BACKGROUND, 1e9, 10.0) == BACKGROUND
