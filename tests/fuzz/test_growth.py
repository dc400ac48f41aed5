"""Growth is told apart from what a machine does to times; a reader with growing work is found, by a counted clock."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable

import pytest

from tests.fuzz import search
from tests.fuzz.growth import grows, sizes
from tests.fuzz.runs import Reader
from tests.fuzz.search import Pattern, Raised, cost_of, hold_on_thread, worst

MB = 1 << 20


def takes(each: Callable[[int], float]) -> Callable[[int], tuple[float, int]]:
    """A program that takes `each(size)` microseconds for a byte."""
    return lambda size: (each(size) * size * 1e-6, size)


FLAT = takes(lambda _: 0.01)


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("linear", lambda _: 0.1),
        ("n log n", lambda size: 0.01 * size.bit_length()),
        ("first touches of large memory", lambda size: 0.1 if size < MB else 0.8),
        ("caches that end one after the other", lambda size: 0.1 if size < 64 << 10 else 0.2 if size < MB else 0.4),
        ("refused after 64 KB", lambda size: 0.1 * min(1, (64 << 10) / size)),
        ("a neighbour during one size", lambda size: 1.0 if size == 256 << 10 else 0.1),
        ("faster with more", lambda size: 1 + 1e5 / size),
    ],
)
def test_what_a_machine_does_to_times_is_no_growth(name: str, each: Callable[[int], float]) -> None:
    assert not grows(takes(each), 16 * MB, FLAT), name


def test_what_makes_every_program_slower_is_no_growth() -> None:
    def swapped(size: int) -> float:
        return 0.01 * 3 ** max(0, (size // (64 << 10)).bit_length() // 2)

    assert grows(takes(swapped), 16 * MB, FLAT)
    assert not grows(takes(swapped), 16 * MB, takes(swapped))


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("quadratic", lambda size: 1e-6 * size),
        ("quadratic behind linear work", lambda size: 0.1 + 1e-6 * size),
        ("quadratic, and slow", lambda size: 1e-2 * size),
        ("cubic", lambda size: 1e-9 * size * size),
    ],
)
def test_growth_is_found(name: str, each: Callable[[int], float]) -> None:
    assert grows(takes(each), 16 * MB, FLAT), name


def test_one_slow_measurement_of_each_size_changes_nothing() -> None:
    rng, asked = random.Random(1), dict[int, int]()

    def noisy(size: int) -> tuple[float, int]:
        asked[size] = asked.get(size, 0) + 1
        return 1e-7 * size * (rng.uniform(3, 50) if asked[size] == 1 else rng.uniform(1, 1.5)), size

    assert not grows(noisy, 16 * MB, FLAT)


class Counted:
    """A clock that goes on by the work that readers count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def joins(self, pieces: Iterable[bytes]) -> None:
        """A reader that joins what it holds with each piece, and forgets it at the end of a line."""
        held = b""
        for piece in pieces:
            held = b"" if b"\n" in piece else held + piece
            self.seconds += 1e-9 * (100 + len(held))

    def searches(self, pieces: Iterable[bytes]) -> None:
        """A reader that looks for the end of each bracket from the bracket on."""
        body = b"".join(pieces)
        at = body.find(b"[")
        while at >= 0:
            end = body.find(b"]", at)
            self.seconds += 1e-9 * ((end if end >= 0 else len(body)) - at)
            at = body.find(b"[", at + 1)
        self.seconds += 1e-8 * len(body)

    def looks_once(self, pieces: Iterable[bytes]) -> None:
        """A reader that looks at each byte once."""
        for piece in pieces:
            self.seconds += 1e-8 * len(piece)


@pytest.mark.parametrize("planted", ["joins", "searches"])
def test_a_reader_with_growing_work_is_found_by_the_search_and_by_the_verdict(planted: str) -> None:
    clock = Counted()
    reader = Reader(getattr(clock, planted), (b"",), (b"[", b"]", b"\n", b"ab"), most_bytes=MB)
    found = worst(reader, random.Random(1), most=400, until=float("inf"), clock=clock)

    def measure(size: int) -> tuple[float, int]:
        cost = cost_of(reader, found.pattern, size, clock)
        return cost.seconds, cost.taken

    assert grows(measure, MB, FLAT), str(found.pattern)


def test_a_reader_that_looks_at_each_byte_once_is_not_blamed() -> None:
    clock = Counted()
    reader = Reader(clock.looks_once, (b"",), (b"a",))
    for cut in (1, 4096):
        costs = {size: cost_of(reader, Pattern(b"", b"a", cut), size, clock) for size in sizes(MB)}
        assert not grows(lambda size: (costs[size].seconds, size), MB, FLAT)  # noqa: B023 - used in this turn


def test_what_a_reader_may_not_raise_names_the_pattern() -> None:
    def broken(pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            {}[piece]

    with pytest.raises(Raised, match=r"KeyError for '' \+ 'xy' \* n, by 4"):
        cost_of(Reader(broken, (b"",), (b"xy",)), Pattern(b"", b"xy", 4), 100)


def test_a_reader_that_does_not_end_is_found_with_its_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    def stands_still(pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            while b"y" in piece:
                pass

    monkeypatch.setattr(search, "ENDLESS_S", 0.05)
    reader = Reader(stands_still, (b"",), (b"x", b"y"), at_once=4)
    with pytest.raises(Raised, match="no end for"):
        worst(reader, random.Random(1), most=400, until=float("inf"))


def test_a_reader_on_a_thread_is_watched_to_its_end() -> None:
    read, threads = list[bytes](), threading.active_count()
    reader = Reader(lambda pieces: read.extend(pieces), (b"",), (b"xy",), on_thread=True)
    assert hold_on_thread(reader, Pattern(b"", b"xy", 4), 100) >= 0
    assert len(b"".join(read)) == 100
    assert threading.active_count() <= threads
