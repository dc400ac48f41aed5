"""Each byte costs the same, whatever came before it: twice as many bytes are at most twice the work of a reader."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.readers import READERS
from tests.fuzz.runs import EXPECTED, Reader
from tests.fuzz.search import Pattern, cost_of, patterns, worst
from tests.work import Work, work_of

SIZE = 1 << 10
SLACK = Work(300, 48 << 10)
"""What does not depend on the size, and grows in steps: buffers, tables."""


def work_for(reader: Reader, pattern: Pattern, size: int) -> Work:
    def run() -> None:
        # what is refused ends the work
        with suppress(*EXPECTED):
            reader.run(pieces)

    pieces = list(pattern.pieces(size))
    return work_of(run)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000), cut=st.sampled_from([1, 50, SIZE]))
def test_twice_the_bytes_are_at_most_twice_the_work(name: str, seed: int, cut: int) -> None:
    reader = READERS[name]
    drawn = patterns(reader, random.Random(seed))
    # any byte, part or pair of parts, or a random unit
    for _ in range(seed % 400):
        next(drawn)
    pattern = Pattern(**{**vars(next(drawn)), "cut": cut})
    once, twice = work_for(reader, pattern, SIZE), work_for(reader, pattern, 2 * SIZE)
    assert twice.lines <= 2.1 * once.lines + SLACK.lines, str(pattern)
    assert twice.allocated <= 2.1 * once.allocated + SLACK.allocated, str(pattern)


def quadratic(pieces: object) -> None:
    """A reader that copies all that came before for each piece."""
    held = b""
    for piece in pieces:  # type: ignore[attr-defined]
        held = held + piece


def hurdling(pieces: object) -> None:
    """A reader that goes back to the beginning for each byte."""
    held = bytearray()
    for piece in pieces:  # type: ignore[attr-defined]
        held += piece
        for _ in range(0, len(held), 50):
            pass


@pytest.mark.parametrize("run", [quadratic, hurdling])
def test_more_work_for_each_byte_is_noticed(run: object) -> None:
    reader, pattern = Reader(run, (b"",), (b"a",)), Pattern(b"", b"a", 1)  # type: ignore[arg-type]
    once, twice = work_for(reader, pattern, SIZE), work_for(reader, pattern, 2 * SIZE)
    assert twice.lines > 2.1 * once.lines + SLACK.lines or twice.allocated > 2.1 * once.allocated + SLACK.allocated


def test_the_search_finds_the_pattern_that_costs_most() -> None:
    def run(pieces: object) -> None:
        for piece in pieces:  # type: ignore[attr-defined]
            for _ in range(200 * piece.count(b"yx")):
                pass

    reader = Reader(run, (b"",), (b"x", b"y", b"z"))
    found = worst(reader, random.Random(1), most=400, until=float("inf"))
    assert b"yx" in found.pattern.unit * 2
    assert found.tried == 400
    assert cost_of(reader, found.pattern, 1 << 12).taken == 1 << 12
