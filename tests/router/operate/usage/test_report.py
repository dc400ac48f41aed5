"""Usage as it is asked for and shown."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from policies.errors import InvalidRequest
from router.inert import inert_output
from router.operate.usage.database import UsageDatabase
from router.operate.usage.report import UsageQuery, as_csv, as_focus, as_json
from router.operate.usage.rows import AMOUNTS, HOUR_S, UsageKey
from router.start.commands import usage
from tests.router.operate.usage.focus import COLUMNS, mistakes
from tests.router.operate.usage.parts import NOON, some_rows


@pytest.fixture
def database(tmp_path: Path) -> Iterator[UsageDatabase]:
    database = UsageDatabase(str(tmp_path / "usage.sqlite"))
    database.migrate()
    database.add("w", 1, some_rows(2, user="ann") | some_rows(1, tenant="b", currency=""), now=NOON)
    yield database
    database.close()


def read(**wanted: str) -> UsageQuery:
    return UsageQuery.read({name.rstrip("_"): text for name, text in wanted.items()}, now=NOON)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_without_a_time_it_is_this_month_by_tenant_and_model() -> None:
    assert read() == UsageQuery(("tenant", "model"), at("2026-11-01"), None, None)


def test_times_are_in_utc() -> None:
    assert read(by="day, user", from_="2026-10-01", to="2026-11-24T13:00", tenant="a") == UsageQuery(
        ("day", "user"), at("2026-10-01"), at("2026-11-24T13:00"), "a"
    )
    assert read(from_="2026-10-01T02:00+02:00").since == at("2026-10-01")


@pytest.mark.parametrize(
    ("wanted", "wrong", "hint"),
    [
        ({"by": "tennant"}, "usage cannot be summed by 'tennant'", "did you mean 'tenant'?"),
        ({"by": "nothing like it"}, "cannot be summed by", "known: hour, day, month, tenant"),
        ({"by": "day,month"}, "one period at a time", "hour, day or month"),
        ({"from": "yesterday"}, "'yesterday' is no time", "write a day like 2026-11-24"),
        ({"from": "2026-11-02", "to": "2026-11-01"}, "nothing is between 2026-11-02 00:00 and 2026-11-01 00:00", ""),
        ({"form": "2026-11-02"}, "usage has no parameter 'form'", "did you mean 'from'?"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(wanted: Mapping[str, str], wrong: str, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=wrong) as caught:
        UsageQuery.read(wanted, now=NOON)
    assert hint in (caught.value.hint or "")


def test_costs_are_exact_in_json_and_in_a_sheet(database: UsageDatabase) -> None:
    rows = read(by="tenant").answer(database)
    assert as_json(rows).decode().count('"cost":0.246913578,"currency":"USD"') == 1
    [mine, other] = json.loads(as_json(rows))
    assert (mine["requests"], mine["finished"], mine["prompt_tokens"], mine["cached_tokens"]) == (2, 2, 200, 80)
    assert (other["tenant"], other["cost"], other["currency"]) == ("b", 123456.789, "")
    sheet = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [(row["tenant"], row["cost"], row["currency"]) for row in sheet] == [
        ("acme", "0.246913578", "USD"),
        ("b", "123456.789", ""),
    ]
    assert as_csv([]) == ""


def test_one_tenant_can_be_asked_for(database: UsageDatabase) -> None:
    assert [row["tenant"] for row in read(tenant="b").answer(database)] == ["b"]
    assert read(tenant="c").answer(database) == []


def test_the_export_fits_focus(database: UsageDatabase) -> None:
    rows = list(csv.DictReader(io.StringIO(as_focus(database, read(tenant="acme")))))
    assert [mistakes(row) for row in rows] == [[], []]
    first = rows[0]
    assert (first["BilledCost"], first["BillingCurrency"], first["ConsumedQuantity"]) == ("0.123456789", "USD", "110.0")
    assert (first["ChargePeriodStart"], first["ChargePeriodEnd"]) == ("2026-11-24T12:00:00Z", "2026-11-24T13:00:00Z")
    assert (first["BillingPeriodStart"], first["BillingPeriodEnd"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert json.loads(first["Tags"]) == {"user": "ann", "class": "chat", "kind": "vllm"}


def test_an_export_without_usage_has_the_columns_alone(database: UsageDatabase) -> None:
    [head] = as_focus(database, read(tenant="c")).splitlines()
    assert set(COLUMNS) <= set(head.split(","))


def test_focus_knows_no_cost_without_a_currency(database: UsageDatabase) -> None:
    with pytest.raises(InvalidRequest, match="FOCUS needs a currency") as caught:
        as_focus(database, read())
    assert caught.value.hint == "write cost: {currency: USD, ...}"


def test_a_request_without_an_answer_is_no_charge(database: UsageDatabase) -> None:
    database.add("w", 2, some_rows(1, tenant="c", pool="", kind=""), now=NOON)
    assert len(as_focus(database, read(tenant="c")).splitlines()) == 1


HOSTILE = ('=HYPERLINK("http://evil.test","x")', "+1", "-1+1", "@SUM(1)", "\t=1", "a;=1", "b\x1b[2J", "＝1", "\n=1")


def test_cells_are_inert_in_every_sheet(tmp_path: Path) -> None:
    database = UsageDatabase(str(tmp_path / "usage.sqlite"))
    database.migrate()
    rows = {
        UsageKey(HOUR_S, name, name, name, name, name, name, name, name, "USD", name): [1] * len(AMOUNTS)
        for name in HOSTILE
    }
    database.add("w", 1, rows, now=0.0)
    query = UsageQuery(("tenant", "user", "model", "pool", "tags"))
    sheets = [as_csv(query.answer(database)), as_focus(database, query)]
    database.close()
    for sheet in sheets:
        found = list(csv.reader(io.StringIO(sheet)))
        assert len(found) == 1 + len(HOSTILE)
        for cell in (cell for row in found for cell in row):
            assert not re.match(r"\s*[=+@＝]|-[^0-9]|\s", cell), cell
            assert "\x1b" not in cell
            assert not re.search(r"[;\t\n]\s*=", cell)


@pytest.mark.parametrize("as_what", ["table", "csv", "json", "focus"])
def test_the_command_shows_every_name(as_what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = UsageDatabase(str(tmp_path / "usage.sqlite"))
    database.migrate()
    names = (*HOSTILE, "[/red]", "[bold]x")
    hour = int(time.time()) // HOUR_S * HOUR_S
    rows = {UsageKey(hour, "t", "", "k", name, "m", "c", "p", "kind", "USD"): [1] * len(AMOUNTS) for name in names}
    database.add("w", 1, rows, now=0.0)
    database.close()
    config = SimpleNamespace(usage=SimpleNamespace(store=str(tmp_path / "usage.sqlite")))
    with inert_output():
        usage.run(config, {"by": "user"}, as_what)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "[/red]" in out
    assert "[bold]x" in out
    assert "\x1b" not in out
