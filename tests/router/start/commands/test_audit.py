"""`pointsman audit`, as its users call it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from policies.errors import ExpectedError
from router.operate.audit.chain import START, Chain
from router.start.cli import app

SECRET = {"POINTSMAN_AUDIT_SECRET": "s"}


def a_log(path: Path, chain: Chain | None = None, count: int = 5) -> list[str]:
    """Writes a log; returns its places as `NUMBER:SEAL`."""
    place, places = START, []
    with path.open("wb") as file:
        for number in range(count):
            details = {"name": "ann", "role": "owner", "by": "key", "address": "::1", "call": "PATCH /x", "path": "/x"}
            at = f"2026-11-2{number}T18:00:00.000Z"
            record = {"at": at, "router": "r:1", "event": "call", **details, "asked": {"weight": number}, "status": 200}
            line, place = (chain or Chain()).line(record, place)
            file.write(line)
            places.append(f"{place.seq}:{place.seal}")
    return places


def audit(path: Path, *options: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["audit", str(path), *options], env=env or {"POINTSMAN_AUDIT_SECRET": None})
    if isinstance(done.exception, ExpectedError):
        return 1, "", str(done.exception)
    return done.exit_code, done.stdout, done.stderr


def test_a_whole_log_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    places = a_log(path)
    assert audit(path, "--verify", "--head", places[2]) == (
        0,
        (
            f"{path}: the chain is whole: records 1 to 5, 2026-11-20T18:00:00.000Z to 2026-11-24T18:00:00.000Z\n"
            f"  the last is {places[4]}\n"
        ),
        "",
    )


def test_a_changed_byte_is_named_and_the_status_is_one(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    a_log(path)
    path.write_bytes(path.read_bytes().replace(b'"weight":2', b'"weight":9'))
    status, out, problem = audit(path, "--verify")
    assert (status, problem) == (1, f"{path}:3: the line behind record 2 was changed: its seal does not fit\n")
    assert "good until there: records 1 to 2" in out
    status, out, problem = audit(path, "--format", "json")
    assert (status, len(out.splitlines())) == (1, 2)
    assert "was changed" in problem


def test_a_log_that_was_cut_off_shows_by_a_record_that_was_noted_before(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    places = a_log(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert audit(path, "--verify")[0] == 0
    status, _, problem = audit(path, "--verify", "--head", places[4])
    assert (status, problem) == (1, f"{path}: record 5 is missing or another one: the log was cut off or rewritten\n")


def test_a_keyed_log_needs_its_secret(tmp_path: Path) -> None:
    path, secret = tmp_path / "audit.log", tmp_path / "secret"
    a_log(path, Chain(b"s"))
    secret.write_text("s\n")
    assert audit(path, "--verify", env=SECRET)[0] == 0
    assert audit(path, "--verify", "--secret-file", str(secret))[0] == 0
    assert audit(path, "--verify")[2] == f"{path}:1: the first line needs the secret to be checked\n"
    wrong = audit(path, "--verify", env={"POINTSMAN_AUDIT_SECRET": "x"})
    assert wrong[2] == f"{path}:1: the first line was changed: its seal does not fit this secret\n"


def test_records_are_exported_of_a_period(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    a_log(path)
    period = ("--from", "2026-11-21", "--to", "2026-11-23T19:00+01:00")
    status, out, _ = audit(path, "--format", "json", *period)
    assert (status, [json.loads(line)["seq"] for line in out.splitlines()]) == (0, [2, 3])
    _, out, _ = audit(path, "--format", "csv", *period)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["seq"], row["name"], row["asked"], row["more"]) for row in rows] == [
        ("2", "ann", '{"weight":1}', ""),
        ("3", "ann", '{"weight":2}', ""),
    ]
    _, out, _ = audit(path, *period)
    assert '2  2026-11-21T18:00:00.000Z  call      ann (owner, key) from ::1: PATCH /x {"weight":1}: 200' in out


def test_a_spreadsheet_computes_nothing_of_what_a_client_wrote(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    record = {"at": "2026-11-20T18:00:00.000Z", "router": "r:1", "event": "call", "path": "=HYPERLINK(1)", "name": "+1"}
    path.write_bytes(Chain().line(record, START)[0])
    [row] = csv.DictReader(io.StringIO(audit(path, "--format", "csv")[1]))
    assert (row["path"], row["name"]) == ("'=HYPERLINK(1)", "'+1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--format", "xml"), "--format must be one of table, json, csv, not xml"),
        (("--from", "yesterday"), "'yesterday' is no time"),
        (("--head", "5"), "'5' is no record (write NUMBER:SEAL"),
        (("--secret-file", "/nowhere"), "the secret cannot be read"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    a_log(path)
    status, _, problem = audit(path, *options)
    assert status != 0
    assert words in " ".join(problem.replace("│", " ").split())


def test_a_log_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    assert audit(tmp_path / "audit.log")[2] == (
        f"there is no audit log {tmp_path / 'audit.log'} (audit.file of the SLA file names it)"
    )
