"""Places where a text can be cut, and its pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

CHUNK_CHARACTERS = 4096
"""Texts are cut at the first place after so many characters; each piece is tokenized and cached by itself."""

MOST_PIECE_CHARACTERS = 512 * 2**10
"""Longer pieces are not tokenized: one of so many Chinese characters takes 0.25 s and 130 MB (one core of an EPYC)."""

SLICE_CHARACTERS = 32 * 2**10
"""Characters that are searched for places at a time."""

_LETTERS = "A-Za-zÀ-ÖØ-öø-ɏЀ-ҁҊ-ԯぁ-ゖァ-ヺ一-龥가-힣"
_MARKS = r'",.:;=/+(\[{'


class CutRule(NamedTuple):
    """A text can be cut between a character of the class `before` and one of the class `after`, if `then` follows."""

    before: str
    after: str
    then: str = ""

    @property
    def pattern(self) -> str:
        """Matches what is before the cut."""
        return f"{self.before}(?={self.after}{self.then})"

    def is_inside(self, token: str) -> bool:
        """Does the text of `token` continue behind such a place, or perhaps so where it has a part of a character?"""
        before = self.before.replace("]", "\ufffd]")
        return re.search(before + self.after, token) is not None


PLACES = (
    CutRule(r"\n", r"\w"),
    CutRule(f"[{_LETTERS}]", " ", f"[{_LETTERS}]"),
    CutRule(f"[{_LETTERS}]", f"[{_MARKS}]"),
)
"""Most tokenizers have a boundary between tokens at all of them. Some keep `don't` together: no apostrophe is here."""

PLACE_CHARACTERS = 3
"""The longest match with what has to follow it."""

SUSPECT = re.compile(rf".[Ġ▁ {_MARKS}]|[Ċ\n].", re.DOTALL)
"""Matches each token of a vocabulary, as vocabularies write it, that could continue behind a place."""


class UncuttableError(Exception):
    """A text has no place to cut it within MOST_PIECE_CHARACTERS."""


class Piece(NamedTuple):
    """A part of a text. `is_last`: nothing follows, so a longer text may have a longer piece here."""

    text: str
    is_last: bool


def cut(
    texts: Iterable[str], places: re.Pattern[str] | None, every: int = CHUNK_CHARACTERS, *, starts: str = ""
) -> Iterator[Piece]:
    """The text that `texts` are the parts of, in pieces of at least `every` characters that end at `places`.

    A piece also ends where the word `starts` follows a line break, if that is a place. A longer text has the same first
    pieces. Without `places` it stays whole. Raises UncuttableError.
    """
    rest, seen = "", 0
    start_of = f"\n{starts}" if starts and places is not None and places.match(f"\n{starts}") else ""
    for part in _slices(texts):
        rest, start = rest + part, 0
        while places is not None:
            found = places.search(rest, max(seen, start + every - 1))
            end = -1 if found is None else found.end()
            if start_of and (early := rest.find(start_of, max(seen, start), len(rest) if end < 0 else end)) >= 0:
                end = early + 1
            if end < 0:
                break
            yield Piece(rest[start:end], is_last=False)
            start = end
        rest = rest[start:]
        # a place at the end may need what follows to be one
        seen = max(0, len(rest) - max(PLACE_CHARACTERS, len(start_of)) + 1)
        if len(rest) > MOST_PIECE_CHARACTERS:
            raise UncuttableError
    yield Piece(rest, is_last=True)


def _slices(texts: Iterable[str]) -> Iterator[str]:
    """`texts` in parts of SLICE_CHARACTERS; the last may be shorter."""
    held: list[str] = []
    size = 0
    for text in texts:
        at = 0
        while at < len(text):
            part = text[at : at + SLICE_CHARACTERS - size]
            held.append(part)
            at, size = at + len(part), size + len(part)
            if size == SLICE_CHARACTERS:
                yield "".join(held)
                held, size = [], 0
    yield "".join(held)
