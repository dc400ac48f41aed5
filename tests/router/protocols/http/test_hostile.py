"""Hostile input on the HTTP port of a whole router: every row of the table in docs/clients.md, and mutated requests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.hostile import ROWS, SLOW, Outcome, outcome_of, slow_outcome, storm

SECTION = "\n## Hostile input\n"
PAGE = (Path(__file__).parents[4] / "docs/clients.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
TABLE = dict(re.findall(r"^\| (.+?) \| (\d.* \| .+) \|$", PAGE, re.MULTILINE))
SOUND = {"chunk extension", "absolute target, `http://b/v1/...`", "`Upgrade: h2c`", "garbage behind a body"}
"""Rows with a first request that every parser reads alike."""


def test_the_page_has_every_row_in_its_order() -> None:
    assert list(TABLE) == [*ROWS, *SLOW]


@pytest.mark.parametrize("name", ROWS)
async def test_what_is_sent_gets_what_the_page_says(name: str) -> None:
    outcome = await outcome_of(ROWS[name])
    assert str(outcome) == TABLE[name]
    if name not in SOUND:
        (status,) = outcome.statuses
        assert 400 <= status <= 505
        assert outcome.reached == ()


@pytest.mark.parametrize("name", [name for name, raw in ROWS.items() if len(raw) < 1000])
async def test_nothing_of_a_refused_request_reaches_a_backend_however_it_is_cut(name: str) -> None:
    whole, cut = await outcome_of(ROWS[name]), await outcome_of(ROWS[name], piece_bytes=7)
    assert cut.reached == whole.reached
    assert cut.statuses == whole.statuses


@pytest.mark.parametrize("name", SLOW)
async def test_a_slow_client_gets_what_the_page_says(name: str) -> None:
    assert str(await slow_outcome(name)) == TABLE[name]


async def test_a_second_request_is_seen_where_it_is_one() -> None:
    assert await outcome_of(b"") == Outcome((200,), ("second",))


async def test_a_router_survives_mutated_requests() -> None:
    seen = await storm(2000)
    assert (seen.failed, seen.hung, seen.errors) == ([], [], [])
    assert seen.is_survived, f"{seen.growth_mib:.1f} MiB more"
    # the mutations are neither harmless nor hopeless
    assert seen.statuses[200] > 400
    assert seen.statuses[400] > 400
    assert seen.reached > 200
