"""The tables for people: what they show of small differences."""

from __future__ import annotations

import re

import pytest

from simulation.report import compared, shown
from tests.simulation.test_summary import a_call, summarised


def changes(first_ttft_s: float, second_ttft_s: float) -> dict[str, str]:
    """The column `2 - 1` of two runs with one request each."""
    text = shown(compared({"a": summarised(a_call(0, first_ttft_s)), "b": summarised(a_call(0, second_ttft_s))}))
    rows = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    return {row[-4]: row[-1] for row in rows if len(row) >= 4}


@pytest.mark.parametrize("more_s", [0.0, 1e-5, -1e-5])
def test_a_difference_that_shows_as_zero_has_no_sign(more_s: float) -> None:
    zeros = {
        "requests": "0",
        "TTFT P50": "0.0 ms",
        "TTFT P95": "0.0 ms",
        "TTFT P99": "0.0 ms",
        "TPOT P95": "0.0 ms",
        "missed": "0.0 points",
        "busy": "0 points",
        "hit rate": "0.0 points",
        "queue": "0.0 ms",
    }
    assert changes(0.1, 0.1 + more_s).items() >= zeros.items()


@pytest.mark.parametrize(("first_s", "second_s", "change"), [(0.1, 0.15, "+50.0 ms"), (0.15, 0.1, "-50.0 ms")])
def test_any_other_difference_has_one(first_s: float, second_s: float, change: str) -> None:
    assert changes(first_s, second_s)["TTFT P50"] == change
