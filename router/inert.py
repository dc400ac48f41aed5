"""Texts of other programs and people, where a program would act on them: in a terminal, in a spreadsheet, in a log.

A user's name, a model's answer or an error of a backend may hold escape codes, which move the cursor, rename the window
or write to the clipboard, marks that show text in another order, or a formula. Sources: Unicode TR 36, 3.1;
OWASP, "CSV Injection".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

ACTIVE = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except for tabs and line breaks, and marks of bidirectional text."""

_FORMULA = re.compile(r"(?:^|(?<=[;\t\r\n|]))(?=\s*[=+\-@＝＋－＠])|^(?=[\t\r\n])")
"""Where a spreadsheet begins a formula: at the beginning of a cell, and behind what some take for the end of one."""
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def inert(text: str) -> str:
    """`text` with an escape as in JSON (backslash, u, four digits) in place of each character that a terminal would act
    on."""
    return ACTIVE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def inert_line(text: str) -> str:
    """The same without line breaks: no text begins a line of its own."""
    return inert(text).replace("\n", "\\u000a")


def inert_cell(text: str) -> str:
    """`text` as a cell of a table, with an apostrophe where a spreadsheet would begin a formula."""
    return text if _NUMBER.fullmatch(text) else _FORMULA.sub("'", inert(text))


class InertStream:
    """A stream of text to which only inert text is written. All else is that of `plain`."""

    def __init__(self, plain: TextIO) -> None:
        self.plain = plain

    def __repr__(self) -> str:
        return f"<InertStream to {self.plain!r}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def write(self, text: str) -> int:
        """Write `text`, inert."""
        return self.plain.write(inert(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Write `lines`, inert."""
        self.plain.writelines(map(inert, lines))


@contextmanager
def inert_output() -> Iterator[None]:
    """Have all that is printed inert."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", InertStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
