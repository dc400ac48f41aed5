"""Hints for misspelled words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word closest to `word`; None if none is close. `cutoff` is the least likeness: 0 is any, 1 equal."""
    # difflib takes time quadratic in the length, so input from outside is cut first
    near = difflib.get_close_matches(word[:80].lower(), sorted(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The question "did you mean 'x'?" for the known word closest to `word`; empty if none is close."""
    meant = nearest(word, known)
    return f"did you mean '{meant}'?" if meant else ""
