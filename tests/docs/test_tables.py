"""Tables and numbered lists of the pages look as they are written: no row is cut off, no number changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, name_of

_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2$", re.MULTILINE | re.DOTALL)
_BORDER = re.compile(r"(?<!\\)\|")


def paragraphs(page: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines between blank ones, outside of fences, each with the number of its first line."""
    text = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text())
    lines: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if line.strip():
            lines.append(line)
        elif lines:
            yield number - len(lines), lines
            lines = []


def cells(row: str) -> int:
    return len(_BORDER.findall(row.strip())) - 1 if row.strip().endswith("|") else 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_row_of_a_table_has_a_head_and_as_many_cells(page: Path) -> None:
    wrong = []
    for first, lines in paragraphs(page):
        rows = [(first + at, line) for at, line in enumerate(lines) if line.lstrip().startswith("|")]
        if not rows:
            continue
        if len(rows) < 2 or not re.fullmatch(r"[|:\s-]+", rows[1][1]):
            wrong.append(f"{rows[0][0]}: rows without a head")
            continue
        width = cells(rows[0][1])
        wrong += [f"{number}: {cells(row)} cells, not {width}" for number, row in rows if cells(row) != width]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_numbers_of_a_list_are_those_that_readers_see(page: Path) -> None:
    # Markdown counts on from the first number, whatever is written
    for first, lines in paragraphs(page):
        numbers = [int(found[1]) for line in lines if (found := re.match(r"(\d+)\. ", line))]
        expected = list(range(numbers[0], numbers[0] + len(numbers))) if numbers else []
        assert numbers == expected, f"line {first}"
