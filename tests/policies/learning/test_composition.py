"""Counts of the kinds of characters in a text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.text_length import _COSTS, PARTS, SHORT, WINDOW_CHARACTERS, WINDOWS, _of_long, composition


def counted(*texts: str) -> dict[str, int]:
    """The parts of `texts` that occur."""
    return {part: int(count) for part, count in zip(PARTS, composition(texts), strict=True) if count}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", {}),
        ("a cat", {"words": 2, "glued_words": 1}),
        ("abcdefghij", {"words": 1, "glued_words": 1, "word_middles": 6, "word_ends": 2}),
        (" internationalisation", {"words": 1, "word_middles": 16, "word_ends": 12}),
        (" getHTTP", {"words": 1, "capitals": 4, "word_middles": 3}),
        ("12 345", {"digits": 5, "numbers": 2}),
        ("--- (", {"punctuation": 4, "punctuation_runs": 2}),
        ("\n\n    x", {"lines": 1, "indents": 4, "words": 1}),
        ("=你好。世界", {"punctuation": 1, "punctuation_runs": 1, "ideographs": 5, "ideograph_runs": 1}),
        ("Äu", {"two_byte": 1, "words": 1, "glued_words": 1}),
        ("€", {"three_byte": 1}),
        ("\U0001f600", {"four_byte": 1}),
    ],
)
def test_each_part_is_counted_where_it_occurs(text: str, parts: dict[str, int]) -> None:
    assert counted(text) == parts


def test_nothing_is_counted_across_two_texts() -> None:
    assert counted(" ab", "cd", "1", "2") == {"words": 2, "glued_words": 1, "digits": 2, "numbers": 2}


def test_a_lone_surrogate_is_counted_as_something() -> None:
    assert counted("\ud800") == {"punctuation": 1, "punctuation_runs": 1}


@given(st.text(max_size=300))
def test_characters_are_counted_once_whatever_the_text(text: str) -> None:
    counts = counted(text)
    shown = [character for character in text if "一" <= character <= "鿿"]
    assert counts.get("ideographs", 0) >= len(shown)
    assert counts.get("digits", 0) == sum(character.isascii() and character.isdigit() for character in text)
    assert all(count >= 0 for count in counts.values())


@given(st.text(st.sampled_from("aZzA0 9\t\n\r.-=äÄ你。好€\U0001f600\ud800\0"), max_size=80) | st.text(max_size=SHORT))
def test_short_texts_are_counted_as_long_ones_are(text: str) -> None:
    assert len(text) <= SHORT
    assert composition([text]) == _of_long(text)


PIECE = "The 3 quick brown foxes, jumping over 12 lazy dogs.\n    return 你好\n"


def test_windows_of_a_long_text_give_about_the_same_estimate_as_all_of_it() -> None:
    whole = PIECE * (8 * WINDOWS * WINDOW_CHARACTERS // len(PIECE))
    expected = counted(PIECE)
    for part, count in counted(whole).items():
        assert count == pytest.approx(expected[part] * len(whole) / len(PIECE), rel=0.03)


def test_a_text_of_one_long_word_has_no_words_where_its_windows_begin() -> None:
    assert counted("a" * 10 * WINDOWS * WINDOW_CHARACTERS).keys() == {"word_middles", "word_ends"}


@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_of_a_text_of_many_kinds_is_near_that_of_all_of_it(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [PIECE * 30, "0123456789 " * 200, "def f(a, b):\n    return a[b] + 1\n" * 50, "今天我们讨论" * 80]
    pieces = [rng.choice(kinds)[: rng.randrange(500, 4000)] for _ in range(400)]
    weights = [_COSTS[part].tokens for part in PARTS]

    def tokens(text: str) -> float:
        return sum(count * weight for count, weight in zip(composition([text]), weights, strict=True))

    # each piece by itself is counted whole
    assert tokens("".join(pieces)) == pytest.approx(sum(map(tokens, pieces)), rel=0.06)
