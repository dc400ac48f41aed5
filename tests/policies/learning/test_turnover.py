from __future__ import annotations

import pytest

from policies.learning.turnover import Turnover


def test_it_stands_at_one_when_every_cache_was_computed_once() -> None:
    turnover = Turnover()
    for _ in range(4):
        turnover.computed(5_000, cache_tokens=20_000, caches=2)
        turnover.computed(10_000, cache_tokens=40_000, caches=2)
    assert turnover.at == pytest.approx(1.0)


def test_a_cache_of_unknown_size_is_taken_to_be_large() -> None:
    turnover = Turnover()
    turnover.computed(1_000, cache_tokens=None, caches=1)
    assert 0.0 < turnover.at < 0.01
