"""The long prompts that backends compute now, by their block keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.cost import Ahead
from policies.nouns import Delta
from router.fleet.cluster.computing import Computing
from router.fleet.cluster.flights import Flight, Flights
from tests.policies.builders import a_request

KEYS = tuple(range(100, 132))


def a_flight(
    backend: str = "b0", keys: tuple[int, ...] = KEYS, *, tokens: int = 2048, rank: int = 0, is_silent: bool = False
) -> Flight:
    request = a_request(prompt_tokens=2048, block_keys=keys, rank=rank)
    book = Flights()
    flight = Flight(backend, request, tokens, 0.0, Ahead(), 1, 1, 2.0, True, book, lambda _: None, is_silent)
    book.begin(flight)
    return flight


def of(computing: Computing, keys: tuple[int, ...] = KEYS, *, now: float = 0.5, rank: int = 0) -> list[tuple[str, int]]:
    request = a_request(prompt_tokens=64 * len(keys), block_keys=keys, rank=rank)
    return [(each.backend, each.tokens) for each in computing.of(request, now)]


def test_a_prompt_is_found_by_the_beginning_that_it_shares_until_its_first_token() -> None:
    left: list[tuple[str, bool]] = []
    computing, flight = Computing(lambda flight, done: left.append((flight.backend, done))), a_flight()
    computing.began(flight)
    assert of(computing, (*KEYS[:20], 1, 2, 3)) == [("b0", 20 * 64)]
    assert of(computing, (1, 2)) == []
    assert KEYS[3] in computing
    flight.heard(Delta(text="so"), 1.0)
    assert of(computing) == []
    assert left == [("b0", True)]
    assert KEYS[3] not in computing
    computing.ended(flight)
    assert left == [("b0", True)]


def test_a_long_prompt_is_found_by_a_few_of_its_deep_blocks() -> None:
    computing, keys = Computing(), tuple(range(1000, 2000))
    flights = [a_flight(keys=keys), a_flight("b1", (*keys[:300], *range(5000, 5400)))]
    for flight in flights:
        computing.began(flight)
        computing.check()
    assert of(computing, keys) == [("b0", (256 + 46 * 16) * 64)]
    # 300 blocks are shared
    assert of(computing, (*keys[:300], *range(900))) == [("b0", 288 * 64), ("b1", 288 * 64)]
    assert keys[255] in computing
    assert sum(key in computing for key in keys) == 256 + 46
    for flight in flights:
        computing.ended(flight)
    computing.check()
    assert keys[0] not in computing


def test_one_that_ends_without_an_answer_is_not_computed() -> None:
    left: list[bool] = []
    computing, flight = Computing(lambda _, done: left.append(done)), a_flight()
    computing.began(flight)
    computing.ended(flight)
    assert (of(computing), left) == ([], [False])


def test_short_prompts_and_cached_ones_are_not_remembered() -> None:
    computing = Computing()
    for flight in (a_flight(tokens=1023), a_flight(keys=())):
        computing.began(flight)
    assert len(computing) == 0


def test_a_request_of_a_better_rank_does_not_wait_for_a_worse_one() -> None:
    computing = Computing()
    computing.began(a_flight(rank=1))
    assert of(computing, rank=0) == []
    assert of(computing, rank=1) == [("b0", 2048)]


def test_the_prompt_of_an_answer_in_one_piece_counts_until_its_predicted_first_token() -> None:
    computing = Computing()
    computing.began(a_flight(is_silent=True))
    assert of(computing, now=1.9)
    assert not of(computing, now=2.0)


@pytest.mark.parametrize(("now", "seconds"), [(0.5, 1.5), (1.9, 0.19), (5.0, 0.5)])
def test_a_late_prompt_takes_a_tenth_of_its_time_more(now: float, seconds: float) -> None:
    computing, flight = Computing(), a_flight()
    computing.began(flight)
    (underway,) = computing.of(flight.request, now)
    assert underway.seconds == pytest.approx(seconds)


@given(st.lists(st.tuples(st.integers(0, 31), st.booleans()), max_size=12))
def test_the_longest_shared_beginning_is_found_whatever_comes_and_goes(history: list[tuple[int, bool]]) -> None:
    computing, open_flights = Computing(), dict[Flight, int]()
    for number, (shared, ends) in enumerate(history):
        flight = a_flight(
            f"b{number}", (*KEYS[:shared], *range(1000 * (number + 1), 1000 * (number + 1) + 32 - shared))
        )
        computing.began(flight)
        open_flights[flight] = shared
        if ends:
            over = next(iter(open_flights))
            del open_flights[over]
            computing.ended(over)
        computing.check()
        longest = max(open_flights.values(), default=0)
        expected = {flight.backend for flight, shared in open_flights.items() if shared == longest and longest}
        assert {backend for backend, _ in of(computing)} == expected
