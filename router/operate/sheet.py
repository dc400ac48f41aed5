"""Sheets in CSV (RFC 4180) of which no cell is a formula, whatever names clients and backends have chosen."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from router.inert import inert_cell


def lines_of_sheet(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A line with the names of the columns, then one for each row: its cells by their names, empty without one."""
    yield _line(columns)
    for row in rows:
        yield _line([row.get(name) for name in columns])


def sheet(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """The same as one text."""
    return "".join(lines_of_sheet(columns, rows))


def _line(cells: Sequence[Any]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow([inert_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return line.getvalue()
