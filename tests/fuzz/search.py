"""Finds the pattern that costs a reader most for each of its bytes."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from tests.fuzz.runs import EXPECTED, Reader, Run

MOST_S = 20.0
"""A pattern that takes longer is given no more bytes."""

ENDLESS_S = 2 * MOST_S
"""A reader that works for so long on one piece does not end."""

_SIZES = (256, 8 << 10, 64 << 10)
_SECOND, _THIRD = 50, 4
"""How many patterns are tried with more bytes."""

Clock = Callable[[], float]

_SLOW_S = 1.0
"""A pattern that takes as long in the search is the worst: no other is tried with more bytes."""

_PIECE = 64
"""Bytes that a piece counts as."""

CUTS = (1, 64, 64, 4096, 1 << 20, 1 << 20)


@dataclass(frozen=True)
class Pattern:
    """`beginning`, then `unit` again and again, in pieces of `cut` bytes. With an `ending` it is a whole of at most
    `most_whole` bytes, and then another one.
    """

    beginning: bytes
    unit: bytes
    cut: int
    ending: bytes = b""
    most_whole: int = 0

    def __str__(self) -> str:
        """As the table shows it."""
        ending = f" + {_shown(self.ending)}" if self.most_whole else ""
        return f"{_shown(self.beginning)} + {_shown(self.unit)} * n{ending}, by {self.cut:,}"

    def by(self, least: int) -> Pattern:
        """It, in pieces of at least so many bytes."""
        return replace(self, cut=max(self.cut, least))

    def pieces(self, size: int) -> Iterator[bytes]:
        """It with `size` bytes, in pieces."""
        if self.most_whole:
            inner = min(size, self.most_whole) - len(self.beginning) - len(self.ending)
            one = self.beginning + self.unit * max(1, inner // len(self.unit)) + self.ending
            # a whole that is cut off is never read
            raw = one * max(1, size // len(one))
            size = len(raw)
        else:
            raw = self.beginning + self.unit * (1 + size // len(self.unit))
        for at in range(0, size, self.cut):
            yield raw[at : min(at + self.cut, size)]


@dataclass(frozen=True)
class Cost:
    """What a pattern took: CPU seconds of this thread, without this program's own work for each piece, and the longest
    time between two pieces, which holds a loop.

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
        yield from _around(reader, unit, rng)
    while True:
        chosen = [rng.choice(parts) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.2:
            chosen.append(bytes([rng.randrange(256)]))
        rng.shuffle(chosen)
        yield from _around(reader, b"".join(chosen), rng)


def _around(reader: Reader, unit: bytes, rng: random.Random) -> Iterator[Pattern]:
    # a reader of all bytes at once never sees the pieces
    cut = reader.at_once if reader.is_whole else min(reader.at_once, rng.choice(CUTS))
    if reader.frames and rng.random() < 0.5:
        beginning, ending = rng.choice(reader.frames)
        yield Pattern(beginning, unit, cut, ending, reader.most_whole)
    else:
        yield Pattern(rng.choice(reader.beginnings), unit, cut)


class Raised(Exception):
    """A reader raised what it may not raise, or does not end."""


class _Endless(BaseException):
    """Nothing in a reader takes this for an error of its own."""


@contextmanager
def _ending() -> Iterator[None]:
    """Raise _Endless in what takes ENDLESS_S of CPU time."""

    def end(*_: object) -> None:
        raise _Endless

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, ENDLESS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def cost_of(reader: Reader, pattern: Pattern, size: int, clock: Clock = time.thread_time) -> Cost:
    """The cost of `size` bytes, or as many as its caller gives it.

    Raises:
        Raised: The reader raised something for these bytes that is not a refusal.
    """
    pieces = list(pattern.pieces(min(size, reader.most_bytes)))
    if reader.encode is not None:
        coded = reader.encode(b"".join(pieces))
        pieces = [coded[at : at + 1000] for at in range(0, len(coded), 1000)]
    cost, tried = _watched(reader.run, pieces, clock, str(pattern))
    own_s = _own_s() * tried if clock is time.thread_time else 0.0
    return Cost(max(0.0, cost.seconds - own_s), cost.hold_s, cost.taken)


def _watched(run: Run, pieces: list[bytes], clock: Clock, name: str) -> tuple[Cost, int]:
    """The cost of the pieces with the work of giving them, and how many were given."""
    hold_s, taken, given = 0.0, 0, 0

    def watched() -> Iterator[bytes]:
        nonlocal hold_s, at, taken, given
        for piece in pieces:
            now = clock()
            hold_s, at = max(hold_s, now - at), now
            if now - began > MOST_S:
                return
            taken, given = taken + len(piece), given + 1
            yield piece

    # the objects of all readers are not looked through meanwhile
    gc.disable()
    began = at = clock()
    try:
        # what it refuses ends the rest
        with _ending(), suppress(*EXPECTED):
            run(watched())
    except _Endless as error:
        raise Raised(f"no end for {name}") from error
    except Exception as error:
        raise Raised(f"{type(error).__name__} for {name}: {str(error)[:200]}") from error
    finally:
        ended = clock()
        gc.enable()
    return Cost(ended - began, max(hold_s, ended - at), taken), given


def hold_on_thread(reader: Reader, pattern: Pattern, size: int) -> float:
    """The longest time, in CPU seconds of a thread that reads `size` bytes, for which no other thread runs: a call
    into C keeps the interpreter.
    """
    pieces = list(pattern.pieces(min(size, reader.most_bytes)))
    is_read, may_end, total_s = threading.Event(), threading.Event(), [0.0]

    def read() -> None:
        with suppress(*EXPECTED):
            reader.run(pieces)
        total_s.append(time.thread_time())
        is_read.set()
        # the clock of a thread goes with it
        may_end.wait()

    thread = threading.Thread(target=read)
    thread.start()
    clock, longest, at = time.pthread_getcpuclockid(thread.ident or 0), 0.0, 0.0
    while not is_read.is_set():
        time.sleep(0.001)
        now = total_s[-1] if is_read.is_set() else time.clock_gettime(clock)
        longest, at = max(longest, now - at), now
    may_end.set()
    thread.join()
    return max(longest, total_s[-1] - at)


@cache
def _own_s() -> float:
    """CPU seconds that this program takes to give one piece."""

    def nothing(pieces: Iterable[bytes]) -> None:
        for _ in pieces:
            pass

    pieces = [b"a"] * 5000
    return min(_watched(nothing, pieces, time.thread_time, "")[0].seconds for _ in range(5)) / len(pieces)


@dataclass
class Found:
    """The worst pattern of a search among `tried` ones; `longest` are others that may take longer in one turn."""

    pattern: Pattern
    tried: int
    longest: tuple[Pattern, ...] = ()


def worst(reader: Reader, rng: random.Random, *, most: int, until: float, clock: Clock = time.thread_time) -> Found:
    """The worst of `most` patterns, or of those that were tried when the clock is at `until`.

    All are tried with 256 bytes. Those that cost most for a byte, and a part of the others, are tried with 8 KB; of
    these, the ones that cost most, and the ones whose bytes have become dearest, with 64 KB. A slow one ends it.
    """
    first = []
    for number, pattern in zip(range(most), _before(until, patterns(reader, rng)), strict=False):
        first.append((_each(reader, pattern, _SIZES[0], clock), number, pattern))
        if _is_slow(first[-1][0], _SIZES[0]):
            return Found(pattern, len(first))
    count = len(first)
    first.sort(reverse=True)
    second = []
    for each, number, pattern in first[:_SECOND] + rng.sample(first[_SECOND:], min(_SECOND, len(first[_SECOND:]))):
        now = _each(reader, pattern, _SIZES[1], clock)
        if _is_slow(now, _SIZES[1]):
            return Found(pattern, count)
        second.append((now, now / max(each, 1e-12), number, pattern))
    dearest = sorted(second, reverse=True)[:_THIRD]
    growing = sorted(second, key=lambda found: found[1], reverse=True)[:_THIRD]
    third = []
    for *_, number, pattern in dearest + growing:
        third.append((_each(reader, pattern, _SIZES[2], clock), number, pattern))
        if _is_slow(third[-1][0], _SIZES[2]):
            return Found(pattern, count)
    ranked = sorted(third, reverse=True)
    whole = tuple(pattern for *_, pattern in first if pattern.most_whole)[:_THIRD]
    return Found(ranked[0][2], count, (*(pattern for *_, pattern in ranked[1:_THIRD]), *whole))


def _is_slow(each: float, size: int) -> bool:
    return each * size > _SLOW_S


def _before(until: float, patterns: Iterator[Pattern]) -> Iterator[Pattern]:
    """One of `patterns` at least, and more until the clock is at `until`."""
    for pattern in patterns:
        yield pattern
        if time.monotonic() > until:
            return


def _each(reader: Reader, pattern: Pattern, size: int, clock: Clock) -> float:
    """Seconds for each byte, the refused ones too; a piece counts as some bytes more, since it is a call at least."""
    cost = cost_of(reader, pattern, size, clock)
    return cost.seconds / (size + _PIECE * (cost.taken // pattern.cut + 1))


def _shown(raw: bytes) -> str:
    text = repr(raw)[1:]
    return text if len(text) <= 60 else f"{text[:57]}...{text[0]}"
