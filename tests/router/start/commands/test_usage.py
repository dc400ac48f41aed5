"""`pointsman usage`."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from policies.errors import ConfigError, InvalidRequest
from router.operate.usage.database import UsageDatabase
from router.start.cli import app
from tests.router.operate.admin.test_usage import a_router_that_keeps_usage
from tests.router.operate.usage.focus import mistakes
from tests.router.operate.usage.parts import NOON, some_rows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    store = tmp_path / "usage.sqlite"
    database = UsageDatabase(str(store))
    database.migrate()
    database.add("w", 1, some_rows(3, user="ann"), now=NOON)
    database.close()
    path = tmp_path / "sla.yaml"
    path.write_text(f"usage: {{store: {store}}}\n")
    return path


def usage(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["usage", str(file), "--from", "2026-11-01", "--to", "2026-12-01", *options])


def test_a_table_is_for_people(file: Path) -> None:
    done = usage(file, "--by", "day,user")
    [line] = [line for line in done.output.splitlines() if "ann" in line]
    assert line.split() == ["2026-11-24", "ann", "3", "300", "120", "30", "0.370370", "USD"]


def test_requests_that_belong_to_no_tenant_are_shown_in_words(file: Path, tmp_path: Path) -> None:
    database = UsageDatabase(str(tmp_path / "usage.sqlite"))
    database.add("w", 2, some_rows(1, tenant="", pool="", currency=""), now=NOON)
    database.close()
    assert "(not identified)" in usage(file, "--by", "tenant").output
    assert [row["tenant"] for row in json.loads(usage(file, "--format", "json").output)] == ["", "acme"]


def test_other_formats_are_for_programs(file: Path) -> None:
    [row] = json.loads(usage(file, "--format", "json").output)
    assert (row["tenant"], row["model"], row["requests"], row["cost"]) == ("acme", "m", 3, 0.370370367)
    [line] = csv.DictReader(io.StringIO(usage(file, "--by", "user", "--format", "csv").output))
    assert (line["user"], line["cost"]) == ("ann", "0.370370367")
    charges = list(csv.DictReader(io.StringIO(usage(file, "--format", "focus").output)))
    assert [mistakes(charge) for charge in charges] == [[], [], []]


def test_a_time_without_usage_says_so(file: Path) -> None:
    assert "No usage in that time." in usage(file, "--tenant", "other").output


def test_a_file_without_a_place_and_a_wrong_question_are_errors_for_people(file: Path, tmp_path: Path) -> None:
    assert usage(file, "--format", "xml").exit_code == 2
    wrong = usage(file, "--by", "tennant")
    assert isinstance(wrong.exception, InvalidRequest)
    (tmp_path / "other.yaml").write_text("server: {state: off}")
    nowhere = usage(tmp_path / "other.yaml")
    assert isinstance(nowhere.exception, ConfigError)
    assert nowhere.exception.hint == "write usage: {store: usage.sqlite}"
    (tmp_path / "other.yaml").write_text("")
    unused = usage(tmp_path / "other.yaml")
    assert isinstance(unused.exception, ConfigError)
    assert unused.exception.message.startswith("no router has kept usage in ")


def test_a_store_that_is_no_database_is_an_error_for_people(file: Path, tmp_path: Path) -> None:
    (tmp_path / "usage.sqlite").write_bytes(b"nothing of the kind" * 100)
    done = usage(file)
    assert isinstance(done.exception, ConfigError)
    assert done.exception.hint == "is usage.store the one that the routers write?"


async def test_a_running_router_is_asked_in_every_format(tmp_path: Path) -> None:
    async with a_router_that_keeps_usage(tmp_path) as operator:
        await operator.ask()
        at = ("usage", "--admin", str(operator.router.admin))
        shown = {}
        for format in ("table", "json", "csv", "focus"):  # noqa: A001
            done = await asyncio.to_thread(CliRunner().invoke, app, [*at, "--format", format])
            assert done.exit_code == 0, (done.output, done.exception)
            shown[format] = done.output
    assert [row["requests"] for row in json.loads(shown["json"])] == [1]
    assert "requests" in shown["table"]
    assert len(list(csv.DictReader(io.StringIO(shown["csv"])))) == 1
    assert [mistakes(charge) for charge in csv.DictReader(io.StringIO(shown["focus"]))] == [[]]


@pytest.mark.parametrize("arguments", [(), ("sla.yaml", "--admin", "127.0.0.1:9")])
def test_either_a_file_or_a_router_is_asked(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["usage", *arguments]).exit_code == 2
