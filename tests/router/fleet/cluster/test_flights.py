from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.cost import Ahead, Work, prefill_work
from policies.nouns import Delta, Sampling, ServiceClass, Usage
from router.fleet.cluster.flights import Flight, Flights, Front
from tests.policies.builders import a_request

PREEMPTIBLE = {"preemptible": True, "rank": 2}


def a_flight(book: Flights, tokens: int = 100, *, at: float = 0.0, held: int = 0, **what: Any) -> Flight:
    is_silent = what.pop("is_silent", False)
    request = a_request(prompt_tokens=tokens + held, **what)
    flight = Flight("b0", request, tokens, at, Ahead(), 1, 1, 0.5, True, book, lambda _: None, is_silent)
    book.begin(flight)
    return flight


def a_piece(tokens: int = 1, **what: Any) -> Delta:
    return Delta(token_ids=tuple(range(tokens)), **what)


def test_a_flight_is_timed_from_its_sending_to_its_first_and_last_piece() -> None:
    flight = a_flight(Flights(), at=10.0)
    flight.heard(Delta(computed_tokens=64), 10.5)
    assert not flight.answered
    for at, delta in ((11.0, a_piece(3)), (11.5, a_piece()), (12.0, a_piece()), (13.0, Delta(finish_reason="stop"))):
        flight.heard(delta, at)
    assert (flight.ttft_s, flight.last_at, flight.drawn_tokens, flight.later_tokens) == (1.0, 12.0, 5, 2)


def test_pieces_without_token_ids_count_as_one_token_until_usage_comes() -> None:
    flight = a_flight(Flights())
    for _ in range(3):
        flight.heard(Delta(text="two words"), 1.0)
    assert flight.later_tokens == 2
    flight.heard(Delta(finish_reason="stop", usage=Usage(100, 9, 0)), 1.0)
    assert flight.later_tokens == 8


def test_an_answer_in_one_piece_has_no_time_of_its_first_token() -> None:
    flight = a_flight(Flights())
    flight.heard(Delta(body=b"{}", tokens=9, is_whole=True), 1.0)
    flight.heard(Delta(usage=Usage(100, 9, 0)), 1.0)
    assert (flight.answered, flight.first_at, flight.drawn_tokens) == (True, None, 9)


def test_a_flight_answered_in_one_piece_counts_as_decoding_from_the_predicted_first_token() -> None:
    book = Flights()
    silent, other = a_flight(book, 100, is_silent=True), a_flight(book, 10)
    book.presume(0.4)
    assert (book.waiting, book.waiting_tokens) == (2, 110)
    book.presume(0.5)
    assert (book.waiting, book.waiting_tokens, silent.answered) == (1, 10, False)
    book.check()
    for flight in (silent, other):
        flight.heard(Delta(body=b"{}", tokens=9, is_whole=True), 2.0)
        book.check()
        book.end(flight, 2.0)
    book.check()
    assert (book.waiting, len(book)) == (0, 0)


def test_the_company_of_one_that_was_presumed_to_decode_counts_from_its_first_token_that_was_seen() -> None:
    book = Flights()
    presumed, other = a_flight(book, 100, is_silent=True), a_flight(book, 100)
    other.heard(a_piece(), 0.5)
    presumed.heard(a_piece(), 1.5)
    assert book.end(presumed, 2.5)[0] == pytest.approx(2.0)


def test_prefill_that_waits_is_summed_up_to_a_rank() -> None:
    book = Flights()
    first, second = a_flight(book, 100), a_flight(book, 10, held=50, rank=3)
    assert (book.waiting, book.waiting_tokens, book.waiting_pairs) == (2, 110, 5000 + 10 * 55)
    assert book.seen_by(3).front.ahead_of(1000) == Ahead(Work(110, 5000 + 10 * 55))
    assert book.seen_by(None).front.ahead_of(1000) == Ahead(Work(110, 5000 + 10 * 55))
    assert book.seen_by(2).front.ahead_of(1000) == Ahead(prefill_work(100))
    first.heard(a_piece(), 1.0)
    assert (book.waiting, book.seen_by(2).front.ahead_of(1000)) == (1, Ahead())
    book.end(second, 2.0)
    assert (book.waiting, len(book)) == (0, 1)
    book.check()


def test_of_longer_prompts_as_much_is_in_front_as_one_has_itself_and_the_rest_beyond() -> None:
    front = Front([Work(1000, 500.0), Work(10, 1.0), Work(100, 20.0)])
    assert front.ahead_of(100) == Ahead(Work(10 + 100 + 100, 1 + 20 + 50), Work(900, 450))
    assert front.ahead_of(1) == Ahead(Work(3, pytest.approx(0.8)), Work(1107, pytest.approx(520.2)))
    assert front.ahead_of(math.inf) == Ahead(Work(1110, 521))
    assert Front([]).ahead_of(5) == Ahead()


def test_what_preemptible_requests_hold_is_reclaimable_for_strictly_better_ranks() -> None:
    book = Flights()
    flight = a_flight(book, 100, held=900, **PREEMPTIBLE)
    a_flight(book, 70, rank=2)
    flight.heard(a_piece(5), 1.0)
    assert [book.seen_by(rank)[1:] for rank in (0, 1, 2, 3)] == [(1, 105), (1, 105), (0, 0), (0, 0)]
    flight.heard(a_piece(2), 1.5)
    assert book.seen_by(0).reclaimable_tokens == 107
    book.end(flight, 2.0)
    assert book.seen_by(0)[1:] == (0, 0)


def test_what_was_sent_after_a_report_is_not_in_it() -> None:
    book = Flights()
    a_flight(book, 1, at=1.0)
    late = a_flight(book, 20, at=2.0)
    a_flight(book, 300, at=3.0)
    assert book.unseen(1.0) == (2, 320)
    late.heard(a_piece(), 4.0)
    assert book.unseen(1.0) == (2, 300)
    assert book.unseen(3.0) == (0, 0)


def test_what_a_report_counts_and_has_ended_since_is_gone() -> None:
    book = Flights()
    first, second = a_flight(book, 1, at=1.0), a_flight(book, 1, at=1.5)
    assert book.gone(2.0) == 0
    third = a_flight(book, 1, at=2.5)
    book.end(first, 3.0)
    assert book.gone(2.0) == 1
    book.end(third, 3.5)
    assert book.gone(2.0) == 1, "the report did not count the third"
    fourth = a_flight(book, 1, at=3.6)
    book.end(second, 4.5)
    book.end(fourth, 5.0)
    assert book.gone(4.0) == 2, "a report of 4.0 that arrives at 5.0 counts the second and the fourth"
    assert book.gone(6.0) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 3)), max_size=60))
def test_a_report_and_what_began_and_ended_since_add_up_to_what_is_there(steps: list[tuple[bool, int, int]]) -> None:
    book, now = Flights(), 0.0
    there: list[Flight] = []
    reported_at, reported = 0.0, 0
    for begins, which, reports in steps:
        now += 1.0
        if begins:
            there.append(a_flight(book, at=now))
        elif there:
            book.end(there.pop(which % len(there)), now)
        if not reports:
            reported_at, reported = now, len(there)
        assert reported - book.gone(reported_at) + book.unseen(reported_at)[0] == len(there)


def test_a_serial_backend_is_busy_with_one_prompt_since_the_one_before_was_computed() -> None:
    book = Flights()
    first = a_flight(book, at=1.0)
    a_flight(book, at=2.0)
    assert book.busy_since == 1.0
    first.heard(a_piece(), 5.0)
    assert book.busy_since == 5.0


def test_sequences_that_decode_beside_a_flight_are_averaged_over_its_time() -> None:
    book = Flights()
    first, second = a_flight(book, 1000), a_flight(book, 3000)
    first.heard(a_piece(0), 10.0)
    second.heard(a_piece(0), 15.0)
    batch, context_tokens = book.end(second, 20.0)
    assert batch == pytest.approx(2.0)
    assert context_tokens == pytest.approx(4000.0)
    batch, context_tokens = book.end(first, 30.0)
    assert batch == pytest.approx(1.25)
    assert 1000 < context_tokens < 4000


def test_each_choice_decodes_by_itself() -> None:
    book = Flights()
    flight = a_flight(book, 1000, sampling=Sampling(choices=4))
    flight.heard(a_piece(0), 1.0)
    assert book.end(flight, 2.0)[0] == pytest.approx(4.0)


def test_the_mean_weight_is_that_of_the_classes_of_open_flights() -> None:
    book = Flights()
    assert book.mean_weight == 1.0
    heavy = a_flight(book, promised=ServiceClass("chat", 0, weight=4.0))
    assert book.mean_weight == 4.0
    unknown = a_flight(book)
    assert book.mean_weight == 2.5
    book.end(heavy, 1.0)
    assert book.mean_weight == 1.0
    book.check()
    book.end(unknown, 2.0)
    assert book.mean_weight == 1.0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "hear", "end"]),
        st.integers(0, 5),
        st.integers(0, 3),
        st.booleans(),
        st.floats(0.0, 10.0),
    ),
    max_size=60,
)


@given(EVENTS)
def test_sums_are_those_of_the_open_flights_whatever_happens(
    events: list[tuple[str, int, int, bool, float]],
) -> None:
    book, now = Flights(), 0.0
    there: list[Flight] = []
    for what, at, rank, preemptible, later in events:
        now += later
        if what == "begin":
            tags = {"rank": rank, "preemptible": preemptible, "is_silent": at % 2 == 0}
            promised = ServiceClass("x", rank, weight=at + 0.1)
            there.append(a_flight(book, at * 97 + 1, at=now, held=at, promised=promised, **tags))
        elif there and what == "hear":
            there[at % len(there)].heard(a_piece(rank), now)
        elif there:
            book.end(there.pop(at % len(there)), now)
        book.check()
        ahead = book.seen_by(rank).front.ahead_of(at * 50)
        assert ahead.alike.tokens + ahead.beyond.tokens <= book.waiting_tokens
    for flight in there:
        book.end(flight, now)
    book.check()
    assert (len(book), book.waiting_tokens, book.seen_by(-1)[1:]) == (0, 0, (0, 0))
    assert book.seen_by(None).front.ahead_of(10) == Ahead()
