"""Timeouts of a request: a multiple of its backend's slow times, within the bounds of the pool and the class."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.nouns import ServiceClass
from policies.timeouts import (
    FACTOR,
    USUAL,
    Bounds,
    SlowTimes,
    Timeouts,
    between_tokens_s,
    first_byte_s,
    first_token_s,
    overdue,
    patience_s,
    timeouts_of,
)

BOUNDS = Timeouts(Bounds(2.0, 100.0), Bounds(4.0, 200.0), Bounds(10.0, 300.0))
QUICK = SlowTimes(first_byte_s=0.01, first_token_s=0.1, whole_s=0.0, gap_s=0.05)
FIRST = {"is_first_try": True}


def test_a_quick_backend_has_the_floor_of_its_pool() -> None:
    assert first_byte_s(BOUNDS, QUICK, 0.0, **FIRST) == 2.0
    assert first_token_s(BOUNDS, QUICK, 0.0, **FIRST) == 4.0
    assert between_tokens_s(BOUNDS, QUICK) == 10.0


def test_a_slow_one_has_a_multiple_of_what_it_usually_takes() -> None:
    slow = SlowTimes(first_byte_s=3.0, first_token_s=20.0, whole_s=0.0, gap_s=5.0)
    assert first_byte_s(BOUNDS, slow, 0.0, **FIRST) == FACTOR * 3.0
    assert first_token_s(BOUNDS, slow, 0.0, **FIRST) == FACTOR * 20.0
    assert between_tokens_s(BOUNDS, slow) == FACTOR * 5.0


def test_nothing_waits_beyond_the_ceiling() -> None:
    stuck = SlowTimes(first_byte_s=1e3, first_token_s=1e3, whole_s=0.0, gap_s=1e3)
    assert first_byte_s(BOUNDS, stuck, 0.0, **FIRST) == 100.0
    assert first_token_s(BOUNDS, stuck, 0.0, **FIRST) == 200.0
    assert between_tokens_s(BOUNDS, stuck) == 300.0


def test_a_first_byte_may_take_as_long_as_the_first_token_is_predicted_to() -> None:
    giant_prompt = replace(QUICK, first_token_s=20.0)
    assert first_byte_s(BOUNDS, giant_prompt, 0.0, **FIRST) == 20.0
    assert first_token_s(BOUNDS, giant_prompt, 0.0, **FIRST) == FACTOR * 20.0


def test_without_observed_first_bytes_the_first_token_counts() -> None:
    unseen = replace(QUICK, first_byte_s=None, first_token_s=5.0)
    assert first_byte_s(BOUNDS, unseen, 0.0, **FIRST) == FACTOR * 5.0


def test_an_answer_in_one_piece_may_take_its_longest_decoding_too() -> None:
    whole = replace(QUICK, whole_s=400.0)
    assert first_token_s(BOUNDS, whole, 0.0, **FIRST) == 4.0 + 3 * 400.0
    assert first_byte_s(BOUNDS, whole, 0.0, **FIRST) == 4.0 + 3 * 400.0, "its head comes with the answer"


def test_a_second_backend_has_twice_as_long() -> None:
    assert first_byte_s(BOUNDS, QUICK, 0.0, is_first_try=False) == 4.0
    assert first_token_s(BOUNDS, QUICK, 0.0, is_first_try=False) == 8.0


@pytest.mark.parametrize(
    ("targets", "seconds"),
    [
        ({}, 10.0),
        ({"ttft_s": 12.0}, 48.0),
        ({"ttft_s": 0.8}, 3.2),
        ({"deadline_s": 900.0}, 90.0),
        ({"deadline_s": 20.0}, 10.0),
    ],
)
def test_a_class_that_waits_longer_has_longer_timeouts(targets: dict[str, float], seconds: float) -> None:
    patience = patience_s(ServiceClass("c", 0, **targets))
    assert patience == pytest.approx(seconds)
    assert first_token_s(BOUNDS, QUICK, patience, **FIRST) == max(4.0, patience)
    assert first_byte_s(BOUNDS, QUICK, patience, **FIRST) == max(2.0, patience)


def test_kinds_that_are_silent_for_long_have_longer_floors() -> None:
    assert timeouts_of("vllm") == timeouts_of("shard") == USUAL
    assert timeouts_of("openai").first_token.least_s == 60.0
    assert timeouts_of("ollama").first_byte.least_s == 120.0
    assert USUAL.least_s == 5.0


def test_what_is_late_is_told_from_what_is_beyond_the_ceiling() -> None:
    assert overdue("byte", 3.9, 4.0, BOUNDS.first_byte) is None
    late = overdue("byte", 4.0, 4.0, BOUNDS.first_byte)
    assert late is not None
    assert not late.is_beyond_most
    beyond = overdue("byte", 100.0, 4.0, BOUNDS.first_byte)
    assert beyond is not None
    assert beyond.is_beyond_most
