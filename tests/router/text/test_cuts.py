"""Tokens of pieces are the tokens of the whole, for every kind of tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.text.cuts import MOST_PIECE_CHARACTERS, PLACES, UncuttableError, cut
from router.text.token_ids import pack
from tests.router.text.kinds import CORPUS, KINDS, a_kind, read

ALL_PLACES = re.compile("|".join(place.pattern for place in PLACES))
WORDS = [
    "the",
    "lazy",
    "dog",
    "fox",
    "don't",
    "x",
    "a.b",
    "</s>",
    "<|end|>",
    "九十",
    "Москвы",
    "e\u0301",
    "😀",
    "3,000",
]
texts = st.lists(st.sampled_from([*WORDS, *" \n\t.,:\"'(/=+[{;_-1aÄ九", "  ", "\n\n", "\r\n", "\u3000"]), max_size=60)
written = texts.map("".join)


def pieces_of(text: str, every: int = 1) -> list[str]:
    return [piece.text for piece in cut([text], ALL_PLACES, every)]


@given(written, st.integers(1, 50))
def test_pieces_make_the_text_again_and_a_longer_text_begins_with_the_same_ones(text: str, every: int) -> None:
    pieces = pieces_of(text, every)
    assert "".join(pieces) == text
    assert pieces_of(text + "\nmore\nand more", every)[: len(pieces) - 1] == pieces[:-1]
    assert all(len(piece) >= every for piece in pieces[:-1])


@given(st.lists(written, max_size=5))
def test_only_the_text_counts_and_not_the_parts_that_it_comes_in(parts: list[str]) -> None:
    pieces = list(cut(parts, ALL_PLACES, every=20))
    assert pieces == list(cut(["".join(parts)], ALL_PLACES, every=20))
    assert [piece.is_last for piece in pieces] == [*[False] * (len(pieces) - 1), True]


def test_a_place_is_found_across_the_slices_that_are_searched() -> None:
    for length in range(32_760, 32_780):
        text = "-" * length + "a b" + "-" * 40_000
        assert pieces_of(text) == [text[: length + 1], text[length + 1 :]]


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=60)
@given(written)
@example(CORPUS)
@example("the lazy dog.a.b=x\ny, the fox")
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str) -> None:
    tokenizer, reader = a_kind(name), read(name)
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = [piece.text for piece in cut([text], reader.places, every=1)]
    assert [token_id for piece in pieces for token_id in tokenizer.encode(piece, add_special_tokens=False).ids] == whole
    assert reader.encode(text) == pack(whole)


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("bundled", "one two\nsix.ten", ["one", " two\n", "six", ".ten"]),
        ("o200k", "don't do", ["don't", " do"]),
        ("gemma", "one two\nsix.ten", ["one", " two\nsix.ten"]),
        ("llama 2", "one two\nsix.ten", ["one two\nsix.ten"]),
        ("over words", "one two\nsix.ten", ["one two\nsix.ten"]),
    ],
)
def test_texts_are_cut_wherever_their_tokenizer_lets_them(name: str, text: str, pieces: list[str]) -> None:
    assert [piece.text for piece in cut([text], read(name).places, every=1)] == pieces


def test_a_text_without_a_place_is_given_up_early() -> None:
    read_characters = 0

    def endless() -> Iterator[str]:
        nonlocal read_characters
        while True:
            read_characters += 1000
            yield "x" * 1000

    with pytest.raises(UncuttableError):
        list(cut(endless(), ALL_PLACES))
    assert MOST_PIECE_CHARACTERS < read_characters < 2 * MOST_PIECE_CHARACTERS


def test_a_text_that_begins_with_a_certain_word_is_a_piece_of_its_own() -> None:
    text = "Say. Document a\n\nDocument b\nlong text.\nDocument\nDocument c"
    pieces = [piece.text for piece in cut([text], ALL_PLACES, starts="Document ")]
    assert pieces == ["Say. Document a\n\n", "Document b\nlong text.\nDocument\n", "Document c"]
    assert [piece.text for piece in cut(text, ALL_PLACES, starts="Document ")] == pieces
    assert [piece.text for piece in cut([text], re.compile("(?=<)"), starts="Document ")] == [text]


@given(written, st.integers(1, 40))
def test_such_pieces_are_at_places_and_make_up_the_text(text: str, every: int) -> None:
    pieces = [piece.text for piece in cut([text], ALL_PLACES, every, starts="the")]
    assert "".join(pieces) == text
    assert all(ALL_PLACES.search(before + after[:2], len(before) - 1) for before, after in pairwise(pieces))
    assert all("\nthe" not in piece for piece in pieces)
