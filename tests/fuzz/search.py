"""Finds the pattern that costs a reader most for each of its bytes."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from tests.fuzz.readers import EXPECTED, Reader

MOST_S = 20.0
"""A pattern that takes longer is given no more bytes."""

_PIECE = 64
"""Bytes that a piece counts as."""

CUTS = (1, 64, 64, 4096, 1 << 20, 1 << 20)


@dataclass(frozen=True)
class Pattern:
    """`beginning`, then `unit` again and again, in pieces of `cut` bytes."""

    beginning: bytes
    unit: bytes
    cut: int

    def __str__(self) -> str:
        """As the table shows it."""
        return f"{_shown(self.beginning)} + {_shown(self.unit)} * n, by {self.cut:,}"

    def pieces(self, size: int) -> Iterator[bytes]:
        """It with `size` bytes, in pieces."""
        raw = self.beginning + self.unit * (1 + size // len(self.unit))
        for at in range(0, size, self.cut):
            yield raw[at : min(at + self.cut, size)]


@dataclass(frozen=True)
class Cost:
    """What a pattern took: CPU seconds of this thread, and the longest time between two pieces, which holds a loop.

    `taken` are the bytes that the reader took before it refused more.
    """

    seconds: float
    hold_s: float
    taken: int


def patterns(reader: Reader, rng: random.Random) -> Iterator[Pattern]:
    """Each byte, each part, each pair of parts by itself; then random ones, without an end."""
    parts = reader.parts
    units = chain(
        (bytes([code]) for code in range(256)), parts, (one + other for one in parts for other in parts if one != other)
    )
    for unit in units:
        yield Pattern(rng.choice(reader.beginnings), unit, min(reader.at_once, rng.choice(CUTS)))
    while True:
        chosen = [rng.choice(parts) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.2:
            chosen.append(bytes([rng.randrange(256)]))
        rng.shuffle(chosen)
        cut = min(reader.at_once, rng.choice(CUTS))
        yield Pattern(rng.choice(reader.beginnings), b"".join(chosen), cut)


def cost_of(reader: Reader, pattern: Pattern, size: int) -> Cost:
    """The cost of `size` bytes. Raises what the reader may not raise."""
    pieces, hold_s = list(pattern.pieces(size)), 0.0
    if reader.encode is not None:
        coded = reader.encode(b"".join(pieces))
        pieces = [coded[at : at + 1000] for at in range(0, len(coded), 1000)]

    def watched() -> Iterator[bytes]:
        nonlocal hold_s, at, taken
        for piece in pieces:
            now = time.thread_time()
            hold_s, at = max(hold_s, now - at), now
            if now - began > MOST_S:
                return
            taken += len(piece)
            yield piece

    # the objects of all readers are not looked through meanwhile
    gc.disable()
    taken, began = 0, time.thread_time()
    at = began
    # what it refuses ends the rest
    with suppress(*EXPECTED):
        reader.run(watched())
    ended = time.thread_time()
    gc.enable()
    return Cost(ended - began, max(hold_s, ended - at), taken)


@dataclass
class Found:
    """The worst pattern of a search among `tried` ones."""

    pattern: Pattern
    tried: int


def worst(reader: Reader, rng: random.Random, *, most: int, until: float) -> Found:
    """The worst of `most` patterns, or of those that were tried when the clock is at `until`.

    Each is tried with a few KB; those that take most for a byte, or more for each byte of more bytes, are tried again.
    """
    ranked: list[tuple[float, int, Pattern]] = []
    tried = 0
    for pattern in patterns(reader, rng):
        if tried >= most or (tried and time.monotonic() > until):
            break
        tried += 1
        # one byte at a time takes long
        size = 1 << 10 if pattern.cut == 1 else 1 << 12
        cost = cost_of(reader, pattern, size)
        ranked.append((_each(cost, pattern, size), tried, pattern))
        if len(ranked) > 400:
            ranked = sorted(ranked, reverse=True)[:100]
    finalists = []
    for _, number, pattern in sorted(ranked, reverse=True)[:8]:
        cost = cost_of(reader, pattern, 1 << 16)
        finalists.append((_each(cost, pattern, 1 << 16), number, pattern))
    return Found(max(finalists)[2], tried)


def _each(cost: Cost, pattern: Pattern, size: int) -> float:
    """Seconds for each byte, the refused ones too; a piece counts as some bytes more, since it is a call at least."""
    return cost.seconds / (size + _PIECE * (cost.taken // pattern.cut + 1))


def _shown(raw: bytes) -> str:
    text = repr(raw)[1:]
    return text if len(text) <= 60 else f"{text[:57]}...{text[0]}"
