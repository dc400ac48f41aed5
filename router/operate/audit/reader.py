"""Reads an audit log: checked from its first line, or its newest records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.nesting import decode_json
from policies.errors import InvalidRequest
from router.operate.audit.chain import MOST_LINE_BYTES, BrokenChainError, Chain, ChainPlace, place_of
from router.operate.audit.files import files_of, newest_first
from router.operate.sheet import lines_of_sheet

COLUMNS = (
    *("seq", "at", "event", "name", "role", "by", "address", "port", "call", "path", "asked", "status", "reason"),
    *("count", "router"),
)
"""Columns of CSV; other members of a record are in the column `more`, as JSON."""

_SEALS = ("prev", "sha256", "hmac")


class Found(NamedTuple):
    """One line of a log: its file and number there, its record, and what is wrong with it, if anything is."""

    file: Path
    number: int
    record: dict[str, Any]
    place: ChainPlace | None
    problem: str | None = None


class AuditPeriod(NamedTuple):
    """From `since` to before `until`, as texts of ISO 8601 in UTC; "" is open."""

    since: str = ""
    until: str = ""

    @classmethod
    def read(cls, since: str | None, until: str | None) -> AuditPeriod:
        """The period that two texts give. Raises InvalidRequest."""
        return cls(_time(since, "from"), _time(until, "to"))

    def has(self, record: dict[str, Any]) -> bool:
        """Whether the record was made in it."""
        at = str(record.get("at", ""))
        return self.since <= at and (not self.until or at < self.until)


ALWAYS = AuditPeriod()

_SET_BACK = timedelta(days=1)


def checked(path: Path, chain: Chain) -> Iterator[Found]:
    """The lines of all files of the log at `path`, in order, each checked. Ends behind the first bad one.

    A line that broke off is not bad if the record behind it says so and follows the one before it: a file that may only
    be appended to keeps such a line. Raises OSError.
    """
    place: ChainPlace | None = None
    torn: tuple[int, Found] | None = None
    for file in files_of(path):
        with file.open("rb") as lines:
            number = 0
            while line := lines.readline(MOST_LINE_BYTES):
                number += 1
                try:
                    if not line.endswith(b"\n"):
                        raise BrokenChainError("does not end: it was cut off, or the router was killed there")
                    if torn is None and place_of(line[:-1]) is None:
                        torn = len(line) - 1, Found(file, number, {}, None, "is no line of an audit log")
                        continue
                    record, place = chain.check(line[:-1], place)
                except BrokenChainError as error:
                    yield Found(file, number, {}, None, str(error)) if torn is None else torn[1]
                    return
                if torn is not None and (record.get("event"), record.get("torn_bytes")) != ("repaired", torn[0]):
                    yield torn[1]
                    return
                torn = None
                yield Found(file, number, record, place)
    if torn is not None:
        yield torn[1]


def newest(
    path: Path, *, most: int, period: AuditPeriod = ALWAYS, event: str | None = None, before: int | None = None
) -> list[dict[str, Any]]:
    """The newest `most` records of this `event` (None: of any), with numbers below `before`, newest first, unchecked.

    Raises OSError.
    """
    found: list[dict[str, Any]] = []
    for line in newest_first(path):
        try:
            record = decode_json(line, dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if period.since and _is_long_before(str(record.get("at", "")), period.since):
            break
        is_wanted = event in (None, record.get("event")) and (before is None or record.get("seq", 0) < before)
        if is_wanted and period.has(record):
            found.append(record)
        if len(found) >= most:
            break
    return found


def as_csv(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The records as lines of CSV, a header first, with inert cells."""
    return lines_of_sheet([*COLUMNS, "more"], map(_cells, records))


def _cells(record: dict[str, Any]) -> dict[str, str]:
    more = {name: value for name, value in record.items() if name not in COLUMNS and name not in _SEALS}
    named = {name: record[name] for name in COLUMNS if record.get(name) is not None}
    return {name: _text(value) for name, value in {**named, **({"more": more} if more else {})}.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _is_long_before(at: str, since: str) -> bool:
    """Whether none of the records before this one is of the period: a clock may have been set back by hours."""
    try:
        return datetime.fromisoformat(since) - datetime.fromisoformat(at) > _SET_BACK
    except ValueError:
        return False


def _time(text: str | None, param: str) -> str:
    if not text:
        return ""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        hint = "write a day like 2026-11-24 or a time like 2026-11-24T13:00, in UTC"
        raise InvalidRequest(f"'{text[:40]}' is no time", hint=hint, param=param) from error
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")
