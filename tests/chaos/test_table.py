"""docs/reliability.md has the measured tables: a row for each fault and for each pair of a run."""

from __future__ import annotations

from tests.chaos.faults import BY_NAME
from tests.chaos.table import PAGE, measured, pair_rows, rows, written

RESULT = {
    "faults": ["server killed"],
    "ends": {"whole": 130, "refused": 4, "cut": 1, "disconnected": 2},
    "statuses": {"503": 3, "UNAVAILABLE": 1},
    "violations": [],
    "recovered_s": 0.25,
    "longest_s": 1.04,
    "more_mb": 0.0,
}


def test_a_row_says_what_clients_saw_and_how_many_requests_got_no_whole_answer() -> None:
    seen, lost, longest, recovered = measured(RESULT)
    assert seen == (
        "130 of 137 answered; 1 stream ends with an error event; 3 get 503; 1 get `UNAVAILABLE`; "
        "2 connections break or cannot be made"
    )
    assert (lost, longest, recovered) == ("7", "1.0s", "0.2s")


def test_the_tables_are_replaced_and_nothing_else() -> None:
    page = PAGE.read_text()
    results = {
        "server killed": RESULT,
        "server killed + redis slow": {**RESULT, "faults": ["server killed", "redis slow"]},
    }
    again = written(page, results)
    assert again != page
    assert len(list(rows(results))) == len(list(pair_rows(results))) == 1
    assert "| server killed + redis slow | 130 of 137 answered" in again
    assert again.splitlines()[:20] == page.splitlines()[:20]
    assert written(again, results) == again


def test_the_page_has_rows_for_at_least_forty_faults_and_twenty_pairs_that_exist() -> None:
    cells = [
        [cell.strip(" `") for cell in line.split("|")] for line in PAGE.read_text().splitlines() if line[:2] == "| "
    ]
    named = {row[-2] for row in cells}
    assert len(named & set(BY_NAME)) >= 40
    pairs = [row[1].split(" + ") for row in cells if " + " in row[1]]
    assert len(pairs) >= 20
    assert all(set(pair) <= set(BY_NAME) for pair in pairs)
