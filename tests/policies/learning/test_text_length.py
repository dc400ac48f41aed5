"""Lengths of prompts without a tokenizer: learnt from counts, never absurd, never a refusal of what fits."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.learning.text_length import (
    MEDIA_TOKENS,
    AnswerLengths,
    Estimate,
    Measured,
    TextLength,
    TextLengths,
    measured,
)
from tests.policies.learning.prompt_texts import TOKENIZERS, Count, bundled, measured_prompt, prompts

texts = st.lists(st.text(max_size=200), max_size=5)

made = cache(lambda name: TOKENIZERS[name][0]())


def of(text: str) -> Measured:
    return measured([text])


@given(texts, texts, st.booleans(), st.integers(0, 5), st.integers(0, 10**6), st.integers(0, 3))
def test_an_estimate_is_sane_before_anything_was_learnt(
    own_texts: list[str], replies: list[str], is_chat: bool, tools: int, tool_bytes: int, media: int
) -> None:
    prompt = measured(own_texts, replies=replies, is_chat=is_chat, tools=tools, tool_bytes=tool_bytes, media=media)
    assert is_sane(TextLength().estimate(prompt))


def is_sane(estimate: Estimate) -> bool:
    return 1 <= estimate.least <= estimate.low <= estimate.tokens <= estimate.high < 2**40


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=80), st.integers(-(2**40), 2**40)), max_size=60), st.text(max_size=80))
def test_whatever_backends_count_estimates_stay_sane(seen: list[tuple[str, int]], asked: str) -> None:
    length = TextLength()
    for text, tokens in seen:
        length.learn(of(text), tokens)
        length.check()
    assert is_sane(length.estimate(of(asked)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.text(min_size=1, max_size=200), st.integers(1, 20))
def test_a_longer_text_of_the_same_kind_is_not_estimated_shorter(seed: int, text: str, times: int) -> None:
    rng, length = random.Random(seed), TextLength()
    for _ in range(40):
        words = " word" * rng.randrange(1, 400)
        length.learn(of(words), 1 + len(words) // rng.randrange(2, 6))
    once, often = length.estimate(of(text + " ")), length.estimate(of((text + " ") * times))
    assert often.tokens >= once.tokens
    assert often.least >= once.least


@pytest.mark.timeout(300)  # training a Unigram tokenizer takes 20 s of CPU
@pytest.mark.parametrize("name", TOKENIZERS)
def test_after_fifty_answers_of_mixed_text_the_median_error_is_below_five_percent(name: str) -> None:
    count, template = made(name), TOKENIZERS[name][1]
    asked = prompts(200, seed=11)
    length, errors, inside = TextLength(), [], []
    for number, written in enumerate(asked):
        prompt, tokens = measured_prompt(written), template(written, count)
        estimate = length.estimate(prompt)
        assert estimate.least <= tokens, "a prompt may fit that would have been refused"
        if number >= 50:
            errors.append(abs(estimate.tokens / tokens - 1.0))
            inside.append(estimate.low <= tokens <= estimate.high)
        length.learn(prompt, tokens)
    length.check()
    # the toy Unigram spells what it was not trained on by letters, as no real vocabulary does; the texts are our pages
    assert statistics.median(errors) < (0.07 if name.startswith("Unigram") else 0.05)
    assert statistics.mean(inside) > 0.75


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "text",
    [
        " document" * 1500,
        *(text * 1000 for text in ("a", "\n", " ", "=", "的", "1", "😀", "x y ", "ÄÖÜ ", "0x1f", "\r\n\t")),
        *(word * 300 for word in ("fooBarBaz", "/usr/lib/python3", "word-and-word ", "。你好 ", "\u200b")),
    ],
    ids=lambda text: repr(text[:9]),
)
def test_repetitive_texts_never_have_fewer_tokens_than_the_lower_bound(name: str, text: str) -> None:
    assert of(text).least <= max(1, made(name)(text))


def test_chinese_is_not_taken_for_a_quarter_of_its_characters() -> None:
    estimate = TextLength().estimate(of("今天我们讨论新的系统。" * 500))
    assert 3000 < estimate.tokens < 7000
    assert estimate.high > 1.5 * estimate.tokens


def test_few_answers_are_enough_for_one_kind_of_text() -> None:
    count: Count = bundled()
    length = TextLength()
    for written in prompts(8, seed=5, kinds=("chinese",)):
        length.learn(measured_prompt(written), TOKENIZERS["bundled, 4k"][1](written, count))
    (asked,) = prompts(1, seed=6, kinds=("chinese",))
    assert length.estimate(measured_prompt(asked)).tokens == pytest.approx(
        TOKENIZERS["bundled, 4k"][1](asked, count), rel=0.05
    )


def a_count(written: str) -> int:
    return 3 + len(written) // 5


def learnt(wrong: Callable[[int, int], int]) -> float:
    """The error after 120 prompts of which every fifth was counted as `wrong` says."""
    rng, length = random.Random(3), TextLength()
    for number in range(120):
        text = " four" * rng.randrange(20, 900)
        tokens = a_count(text)
        length.learn(of(text), wrong(tokens, number) if number % 5 == 4 else tokens)
    asked = " four" * 500
    return abs(length.estimate(of(asked)).tokens / a_count(asked) - 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda tokens, _: tokens * 4, id="four times as many"),
        pytest.param(lambda tokens, _: tokens // 3, id="what was not cached"),
        pytest.param(lambda tokens, number: 0 if number % 2 else tokens * 1000, id="nothing, or far too many"),
        pytest.param(lambda *_: 1, id="always one"),
    ],
)
def test_counts_that_are_wrong_now_and_then_change_little(wrong: Callable[[int, int], int]) -> None:
    assert learnt(wrong) < 0.05


def test_a_model_that_was_changed_is_learnt_anew() -> None:
    length, text = TextLength(), " four" * 400
    for factor in (1, 3):
        for _ in range(300):
            length.learn(of(text), 400 * factor)
        assert length.estimate(of(text)).tokens == pytest.approx(400 * factor, rel=0.03)


def test_of_media_nothing_is_learnt_and_each_counts_as_before() -> None:
    length = TextLength()
    seen = measured(["look"], is_chat=True, media=2)
    length.learn(seen, 5000)
    assert length.learnt == 0
    estimate = length.estimate(seen)
    assert estimate.tokens == 2 * MEDIA_TOKENS + length.estimate(measured(["look"], is_chat=True)).tokens
    assert estimate.least < 10


def test_what_templates_may_leave_out_does_not_count_towards_the_lower_bound() -> None:
    long = " thought" * 1000
    assert measured(["so?"], replies=[long], is_chat=True, tools=3, tool_bytes=10**5).least < 10


def test_each_tool_and_the_bytes_of_its_description_add_to_the_estimate_and_to_its_bound() -> None:
    length = TextLength()
    without, one, two = (
        length.estimate(measured(["so?"], is_chat=True, tools=tools, tool_bytes=size))
        for tools, size in ((0, 0), (1, 400), (2, 400))
    )
    assert one.tokens - without.tokens == pytest.approx(6 + 0.25 * 400, abs=1)
    assert two.tokens - one.tokens == pytest.approx(6, abs=1)
    long = measured(["so?"], is_chat=True, tools=1, tool_bytes=4000)
    assert long.most - measured(["so?"], is_chat=True).most == 4 * 4000


def test_models_are_kept_apart_and_not_more_than_may_be() -> None:
    lengths = TextLengths(most=2)
    lengths.of("a").learn(of("one two"), 2)
    lengths.of("b")
    assert lengths.of("a").learnt == 1
    lengths.of("c")
    lengths.check()
    assert (lengths.of("a").learnt, len(lengths._models)) == (1, 2)
    assert math.isclose(lengths.of("b").learnt, 0)


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
