"""Caches that might have been: the longest prefix counts, and what was used longest ago goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from router.operate.diagnose.caches import HeldPrefix, LruPrefixes

STEP = 512


def test_an_infinite_cache_holds_every_prefix() -> None:
    cache = LruPrefixes()
    for number in range(1000):
        cache.add((number, 5000 + number), STEP)
    assert cache.held((7, 5007, 99_999), STEP) == HeldPrefix(2 * STEP, 2 * STEP)
    assert cache.held((5007,), STEP).tokens == STEP
    assert cache.held((99_999, 7), STEP).tokens == 0


def test_the_prefix_that_was_used_longest_ago_goes_first_and_its_end_before_its_beginning() -> None:
    cache = LruPrefixes(4 * STEP)
    cache.add((1, 2), STEP)
    cache.add((3, 4), STEP)
    cache.add((1, 2), STEP)
    cache.add((5,), STEP)
    assert cache.held((3, 4), STEP).tokens == STEP
    assert cache.held((1, 2), STEP).tokens == 2 * STEP


def test_answers_and_ends_of_prompts_take_room() -> None:
    cache = LruPrefixes(4 * STEP)
    cache.add((1, 2), STEP)
    cache.add((3,), STEP, further=2 * STEP)
    assert cache.held((1, 2), STEP).tokens == STEP


def test_a_prefix_counts_as_computed_once_its_first_request_has_a_token() -> None:
    cache = LruPrefixes()
    cache.add((1, 2), STEP, computed_s=10.0)
    assert cache.held((1, 2), STEP, at_s=9.0) == HeldPrefix(2 * STEP, 0)
    assert cache.held((1, 2), STEP, at_s=10.0) == HeldPrefix(2 * STEP, 2 * STEP)
    # a later request does not make it later
    cache.add((1, 2, 3), STEP, computed_s=20.0)
    assert cache.held((1, 2, 3), STEP, at_s=15.0) == HeldPrefix(3 * STEP, 2 * STEP)


@given(
    prompts=some.lists(some.lists(some.integers(0, 9), min_size=1, max_size=5, unique=True), max_size=30),
    size=some.integers(0, 12),
)
def test_it_never_holds_more_than_its_size(prompts: list[list[int]], size: int) -> None:
    cache = LruPrefixes(size * STEP)
    for prompt in prompts:
        cache.add(prompt, STEP, further=100)
        assert cache.used <= cache.size
