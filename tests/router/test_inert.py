"""Texts of others are inert where a terminal, a spreadsheet or a reader of logs would act on them."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from router.inert import InertStream, inert, inert_cell, inert_output
from router.operate.telemetry.logs import InertLines
from router.terminal import inert_console

ROOT = Path(__file__).parents[2]

HOSTILE = [
    '=HYPERLINK("http://evil.test","x")',
    "a\x1b[2J\x1b]0;title\x07b",
    "\x9b31mred",
    "over\rwritten",
    "\x1b]52;c;ZWNobyBoaQ==\x07",
    "user\u202egnp.exe",
    "[red]markup[/red] [/nothing] :smile:",
    "\x00\x7f\u2066",
]
ANY = st.text(st.characters(codec=None) | st.sampled_from("\x1b\x9b\r\n\t=+-@;|'\"\u202e＝ "))


@given(ANY)
def test_no_text_has_a_character_left_that_a_terminal_acts_on(text: str) -> None:
    shown = inert(text)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    shown.encode()
    assert inert(shown) == shown
    if text.replace("\n", "").replace("\t", "").isprintable():
        assert shown == text


@given(st.recursive(ANY | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_json_stays_json_with_the_same_values(value: Any) -> None:
    written = json.dumps(value, ensure_ascii=False)
    assert json.loads(inert(written)) == value


@given(ANY)
def test_no_cell_begins_a_formula(text: str) -> None:
    sheet = io.StringIO()
    csv.writer(sheet).writerow([inert_cell(text)])
    [row] = csv.reader(io.StringIO(sheet.getvalue()))
    for part in re.split(r"[;\t\r\n|]", row[0]):
        is_number = re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", row[0])
        assert is_number or not re.match(r"\s*[=+\-@＝＋－＠]", part)


@pytest.mark.parametrize("number", ["-5", "0.25", "-0.000001"])
def test_a_number_is_a_number(number: str) -> None:
    assert inert_cell(number) == number


@pytest.mark.parametrize("text", HOSTILE)
def test_a_table_shows_foreign_text_as_it_is_and_keeps_its_own_colours(text: str) -> None:
    out = io.StringIO()
    console = inert_console(file=InertStream(out), force_terminal=True, width=150)
    table = Table(title="\x1bx")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_row(text)
    table.add_row(Text(text))
    console.print(table)
    console.print(text)
    shown = out.getvalue()
    # rich's own: colours alone
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\n", "").isprintable()
    assert shown.count(inert(text)) >= 1 or "markup" in text
    assert "\x1b[1m" in shown


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_printed_is_inert_on_both_streams(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with inert_output():
        print(text)
        print(text, file=sys.stderr)
        sys.stdout.writelines([text])
        assert sys.stdout.encoding
    assert sys.stdout is before
    out, err = capsys.readouterr()
    assert (out, err) == (f"{inert(text)}\n{inert(text)}", f"{inert(text)}\n")


def test_a_message_of_the_log_begins_no_line_of_its_own() -> None:
    record = logging.LogRecord(
        "x", logging.ERROR, "f", 1, "no model '%s'", ("a\n2026-11-28 ERROR forged\x1b[2J",), None
    )
    line = InertLines("%(levelname)s %(message)s").format(record)
    assert line == "ERROR no model 'a\\u000a2026-11-28 ERROR forged\\u001b[2J'"


@pytest.mark.parametrize(
    ("uses", "places"),
    [
        (r"\bcsv\.(writer|DictWriter)\b", {"router/operate/sheet.py"}),
        (r"\bConsole\(|from rich import print", set()),
    ],
)
def test_sheets_are_written_in_one_place_and_no_console_is_another_one(uses: str, places: set[str]) -> None:
    files = [file for folder in ("router", "simulation") for file in (ROOT / folder).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if re.search(uses, file.read_text())}
    assert found == places
