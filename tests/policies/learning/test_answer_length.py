"""The expected length of an answer is what such answers had."""

import pytest

from policies.learning.answer_length import AnswerLengths


def test_before_any_answer_a_guess_stands_in_that_keeps_to_the_limit() -> None:
    lengths = AnswerLengths()
    assert lengths.expected("acme", "chat", most=10_000) == 256
    assert lengths.expected("acme", "chat", most=16) == 16


def test_each_tenant_and_class_has_its_own_mean() -> None:
    lengths = AnswerLengths()
    for _ in range(200):
        lengths.learn("acme", "chat", 40)
        lengths.learn("acme", "batch", 2000)
    assert lengths.expected("acme", "chat", most=10_000) == pytest.approx(40, abs=1)
    assert lengths.expected("acme", "batch", most=10_000) == pytest.approx(2000, abs=5)
    assert lengths.expected("labs", "chat", most=10_000) == 256


def test_answers_that_were_empty_still_count_as_a_token() -> None:
    lengths = AnswerLengths()
    lengths.learn("acme", "chat", 0)
    assert lengths.expected("acme", "chat", most=100) == 1
