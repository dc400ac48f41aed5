"""Counts of the kinds of characters in a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.text_length import PARTS, SHORT, WINDOW_CHARACTERS, WINDOWS, _of_long, _of_short, composition


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
    assert _of_short(text) == _of_long(text)


def test_windows_of_a_long_text_give_about_the_same_estimate_as_all_of_it() -> None:
    piece = "The 3 quick brown foxes, jumping over 12 lazy dogs.\n    return 你好\n"
    whole = piece * (4 * WINDOWS * WINDOW_CHARACTERS // len(piece))
    expected = counted(piece)
    for part, count in counted(whole).items():
        assert count == pytest.approx(expected[part] * len(whole) / len(piece), rel=0.03)
