"""The lines of a job's file: one request each, found without reading the file whole.

Source: OpenAI API reference, "Batch", "The request input object".
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from backends.nesting import decode_json

MOST_ID = 512
"""Characters of a `custom_id`."""


class LinePlace(NamedTuple):
    """Where a line is: its number in the file (the first is 1), its first byte, and how many bytes it has."""

    number: int
    offset: int
    size: int


class LineText(msgspec.Struct, frozen=True):
    """A line as it is written. `body` is that of a call of the path `url`."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def lines_of(path: Path, *, most_bytes: int) -> Iterator[tuple[LinePlace, bytes]]:
    """The lines of a file that are not blank, with their bytes; of a longer one the first `most_bytes` + 1. A mark of
    UTF-8 at its beginning, as editors on Windows write it, is none of it."""
    with path.open("rb") as file:
        number, offset = 0, len(BOM_UTF8)
        if file.read(offset) != BOM_UTF8:
            offset = file.seek(0)
        while raw := file.readline(most_bytes + 1):
            number += 1
            size = len(raw)
            if not raw.endswith(b"\n") and size > most_bytes:
                while (more := file.readline(most_bytes)) and not more.endswith(b"\n"):
                    size += len(more)
                size += len(more)
            if raw.strip():
                yield LinePlace(number, offset, len(raw)), raw
            offset += size


def read_line(raw: bytes) -> LineText:
    """The request in `raw`. Raises msgspec.DecodeError and UnicodeDecodeError."""
    return decode_json(raw, LineText)
