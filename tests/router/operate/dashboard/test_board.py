"""The router's memory by decision, class, tenant and backend, and its bounds."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import BackendFailed, QuotaExceeded
from policies.nouns import Decision, Request, Usage
from router.call.observer import Spent
from router.operate.dashboard.board import MOST_KEYS, MOST_ROWS, Board
from router.operate.telemetry.telemetry import Telemetry

PREFIXES = {keys: tuple(range(keys)) for keys in (0, 10, 40_000, 2 * MOST_KEYS)}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_board() -> tuple[Board, Telemetry, Clock]:
    clock = Clock()
    telemetry = Telemetry(clock)
    board = Board(clock)
    telemetry.listen(board)
    return board, telemetry, clock


def a_request(name: str = "r", **fields: object) -> Request:
    return Request(**{"id": name, "tenant": "acme", "model": "m", "domain": "acme", "prompt_tokens": 100,
                      "max_new_tokens": 5, "service_class": "chat", **fields})  # type: ignore[arg-type] # fmt: skip


def answer(telemetry: Telemetry, clock: Clock, name: str = "r", backend: str = "b0") -> None:
    """One call that is answered after 0.5 s, the last token 1 s later."""
    with telemetry.account(name) as account:
        account.tenant, account.service_class, account.model = "acme", "chat", "m"
        telemetry.decided(a_request(name), Decision(backend, "default"), None)
        clock.now += 0.5
        account.heard(clock.now)
        clock.now += 1.0
        account.heard(clock.now)
        account.usage = Usage(100, 11, 40)
        account.spent = (Spent("m", "own", account.usage, 108_000),)


def test_a_decision_is_followed_to_its_end() -> None:
    board, telemetry, clock = a_board()
    telemetry.decided(a_request(), Decision("b0", "default"), None)
    (row,) = board.rows()
    assert (row.outcome, row.at, row.ttft_s) == ("running", 1000.0, None)
    before = board.revision
    answer(telemetry, clock, "other")
    (_, other) = board.rows()
    assert (other.outcome, other.ttft_s, other.usage.cached_tokens, other.ended_at) == ("finished", 0.5, 40, 1001.5)
    assert [row.request for row in board.rows(since=before)] == ["other"]
    assert board.row(other.number) is other
    board.check()


def test_classes_tenants_and_backends_are_summed_over_the_last_minute() -> None:
    board, telemetry, clock = a_board()
    for _ in range(3):
        answer(telemetry, clock)
    telemetry.missed("chat", "queue")
    minute = board.of_class("chat", clock.now)
    assert minute.outcomes == {"finished": 3}
    assert minute.steps == {"queue": 1}
    assert minute.ttft.quantile(0.95) == pytest.approx(0.5, rel=0.02)
    assert minute.tpot.quantile(0.95) == pytest.approx(0.1, rel=0.02)
    assert board.of_tenant("acme", clock.now).cost == 3 * (60 * 1000 + 40 * 100 + 11 * 4000)
    assert board.of_backend("b0", clock.now).cached_tokens == 120
    clock.now += 120
    assert board.of_class("chat", clock.now).outcomes == {}
    assert board.of_tenant("acme", clock.now).requests == 0
    assert board.totals["acme", "m"].requests == 3


def test_what_was_refused_before_a_decision_is_shown_too() -> None:
    board, telemetry, _ = a_board()
    with suppress(QuotaExceeded), telemetry.account("r") as account:
        account.tenant = "acme"
        raise QuotaExceeded("no")
    (row,) = board.rows()
    assert (row.decision, row.outcome, row.code, row.tenant) == (None, "rejected", "rate_limit_exceeded", "acme")


def test_a_prompt_that_was_tried_elsewhere_has_a_row_for_each_try() -> None:
    board, telemetry, clock = a_board()
    telemetry.decided(a_request(), Decision("b0", "default"), None)
    answer(telemetry, clock, backend="b1")
    first, second = board.rows()
    assert [(entry.outcome, entry.decision and entry.decision.chosen) for entry in (first, second)] == [
        ("retried", "b0"),
        ("finished", "b1"),
    ]
    assert board.of_backend("b0", clock.now).outcomes == {"retried": 1}


def test_each_prompt_of_a_call_ends_with_it() -> None:
    board, telemetry, _ = a_board()
    with suppress(BackendFailed), telemetry.account("r"):
        for number in range(3):
            telemetry.decided(a_request(f"r-{number}"), Decision("b0", "default"), None)
        raise BackendFailed("gone")
    assert [row.outcome for row in board.rows()] == ["failed"] * 3
    assert board.of_backend("b0", 1000.0).outcomes == {"failed": 3}


def test_unknown_names_do_not_fill_the_memory() -> None:
    board, telemetry, _ = a_board()
    for number in range(5000):
        with telemetry.account(str(number)) as account:
            account.tenant, account.model = "acme", f"model-{number}"
    assert len(board.totals) == 4097
    assert board.totals["others", ""].requests == 5000 - 4096


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(list(PREFIXES))), max_size=400))
def test_memory_is_bounded_whatever_comes(calls: list[tuple[int, int]]) -> None:
    board, telemetry, _ = a_board()
    for number, keys in calls:
        telemetry.decided(a_request(str(number), block_keys=PREFIXES[keys]), Decision("b0", "default"), None)
        board.check()
    assert len(list(board.rows())) <= MOST_ROWS


def test_a_backend_that_reports_no_cache_has_no_hit_rate_and_one_that_found_nothing_has_one_of_zero() -> None:
    clock = Clock()
    telemetry, reporting = Telemetry(clock), set[str]()
    board = Board(clock, reporting.__contains__)
    telemetry.listen(board)
    answer(telemetry, clock, "r1")
    assert (board.of_backend("b0", clock.now).hit_share, board.of_tenant("acme", clock.now).hit_share) == (None, None)
    reporting.add("b0")
    answer(telemetry, clock, "r2")
    assert board.of_backend("b0", clock.now).reported_tokens == 100
    assert board.of_backend("b0", clock.now).prompt_tokens == 200
    assert [row.is_reported for row in board.rows()] == [False, True]
