"""The capacity of a backend: the load up to which targets are met."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.operate.plan.capacity import ENOUGH_ANSWERS, MISSED_AT_MOST, Judged, capacity_of, kept_until

ANSWERS = st.lists(st.builds(Judged, st.integers(1, 20), st.booleans()), min_size=1, max_size=80)


def answers(until: int, to: int, each: int = 10) -> list[Judged]:
    """Answers at each load from 1 to `to`; those above `until` missed."""
    return [Judged(load, load > until) for load in range(1, to + 1) for _ in range(each)]


def test_the_capacity_is_the_highest_load_before_targets_are_missed() -> None:
    found = capacity_of("requests", {"chat": answers(6, 10), "other": answers(8, 10)}, 10)
    assert (found.amount, found.is_least, found.judged_by, found.answers) == (6, False, "chat", 200)


def test_one_unlucky_answer_at_a_low_load_does_not_decide() -> None:
    assert kept_until([Judged(1, missed=True), *answers(6, 10, each=20)]) == 6


def test_without_a_missed_target_it_is_the_highest_load_that_was_seen_often() -> None:
    found = capacity_of("prompt_tokens", {"chat": [*answers(9, 4), Judged(9, missed=False)]}, 12)
    assert (found.amount, found.is_least) == (3, True)


def test_too_few_answers_are_not_judged() -> None:
    found = capacity_of("requests", {"chat": answers(0, 1, each=ENOUGH_ANSWERS - 1)}, 7)
    assert (found.amount, found.is_least, found.answers) == (7, True, 0)


def test_a_class_that_misses_at_every_load_does_not_hide_the_capacity_of_others() -> None:
    never, chat = answers(0, 10), answers(6, 10)
    assert capacity_of("requests", {"slow": never, "chat": chat}, 10).amount == 6
    assert capacity_of("requests", {"slow": never}, 10).amount is None


@given(ANSWERS)
def test_up_to_the_capacity_few_answers_missed_and_it_is_a_load_of_the_log(judged: list[Judged]) -> None:
    limit = kept_until(judged)
    if limit is not None:
        below = [answer.missed for answer in judged if answer.load <= limit]
        assert limit in {answer.load for answer in judged}
        assert sum(below) <= MISSED_AT_MOST * len(below)


@given(ANSWERS, st.integers(1, 20))
def test_a_further_missed_target_never_raises_the_capacity(judged: list[Judged], load: int) -> None:
    before, after = kept_until(judged), kept_until([*judged, Judged(load, missed=True)])
    assert (after or 0) <= (before or 0)
