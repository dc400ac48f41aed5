"""Reads a decision log: its records in the order of its lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import SEEK_END
from pathlib import Path
from typing import BinaryIO

import msgspec

from policies.errors import InvalidRequest
from router.operate.telemetry.decision_record import VERSION, Record

_RECORDS = msgspec.json.Decoder(Record)

_LAST_TIME_S = 253_402_300_800
"""The year 10000, in seconds since 1970."""


def records_of(
    path: Path,
    *,
    on_read: Callable[[int], None] = lambda _: None,
    on_torn: Callable[[int], None] = lambda _: None,
    last_bytes: int | None = None,
) -> Iterator[tuple[int, Record]]:
    """The records of the decision log at `path`, with the numbers of their lines.

    Lines that are not JSON, such as one cut off by a crash, are skipped. `on_read` gets the bytes of each line and
    `on_torn` the number of each skipped line. With `last_bytes`, only whole lines among the last bytes are read, and
    numbers count from there. Raises InvalidRequest that names the line, or the file if it cannot be
    read.
    """
    try:
        with path.open("rb") as file:
            if last_bytes is not None:
                _skip_to_last(file, last_bytes)
            for number, text in enumerate(file, 1):
                on_read(len(text))
                if not text.strip():
                    continue
                try:
                    record = _RECORDS.decode(text)
                except msgspec.ValidationError as error:
                    hint = "is it a decision log? A trace is read by `pointsman simulate --trace`"
                    raise InvalidRequest(f"{path}:{number}: {error}", hint=hint) from error
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    on_torn(number)
                    continue
                _check(record, f"{path}:{number}")
                yield number, record
    except OSError as error:
        hint = "server.decision_log or --decisions names the file that a router writes"
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", hint=hint) from error


def _skip_to_last(file: BinaryIO, count: int) -> None:
    """Go to the first line that begins among the last `count` bytes."""
    size = file.seek(0, SEEK_END)
    file.seek(max(0, size - count - 1))
    if size > count:
        file.readline()


def _check(record: Record, where: str) -> None:
    if record.version != VERSION:
        raise InvalidRequest(f"{where}: version {record.version} is not known", hint=f"known: {VERSION}")
    if not 0 <= record.time < _LAST_TIME_S or record.seconds < 0:
        raise InvalidRequest(
            f"{where}: time is {record.time:g} and seconds is {record.seconds:g}",
            hint="time is in seconds since 1970, and seconds is not negative: was the log edited?",
        )
    if record.choices < 1:
        hint = "was the log edited?"
        raise InvalidRequest(f"{where}: choices is {record.choices}; it must be 1 or more", hint=hint)
