"""`pointsman audit`: an audit log, checked and exported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import chain as joined
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from policies.errors import ConfigError
from policies.quantities import digits
from router.operate.audit.chain import Chain, ChainPlace
from router.operate.audit.files import files_of
from router.operate.audit.reader import AuditPeriod, Found, as_csv, checked

FORMATS = ("table", "json", "csv")
SECRET = "POINTSMAN_AUDIT_SECRET"  # noqa: S105 - its name
_HEAD_HINT = "write NUMBER:SEAL, as the router's log and GET /admin/audit give it"


class AuditOptions(NamedTuple):
    """What the command line asks for."""

    verify: bool
    format: str
    period: AuditPeriod
    head: ChainPlace | None
    secret_file: Path | None


def run(file: Path, options: AuditOptions) -> bool:
    """Print the records of the log, or with `verify` what its check finds; returns whether the chain is whole.

    Raises ConfigError.
    """
    if not files_of(file):
        raise ConfigError(f"there is no audit log {file}", hint="audit.file of the SLA file names it")
    checking = _Checking(Chain(_secret(options.secret_file)), options.head)
    try:
        found = checking.over(file)
        if options.verify:
            for _ in found:
                pass
        else:
            _print((one.record for one in found if options.period.has(one.record)), options.format)
    except OSError as error:
        raise ConfigError(f"the audit log {file} cannot be read: {error.strerror or error}") from error
    checking.tell(file, is_asked=options.verify)
    return checking.problem is None


def read_head(text: str | None) -> ChainPlace | None:
    """The place in `NUMBER:SEAL`. Raises ConfigError."""
    if text is None:
        return None
    number, _, seal = text.partition(":")
    at = digits(number, most=2**53)
    if at is None or not (len(seal) == 64 and set(seal) <= set("0123456789abcdef")):
        raise ConfigError(f"'{text[:100]}' is no record", hint=_HEAD_HINT)
    return ChainPlace(at, seal)


class _Checking:
    """Checks a log while it is read, and keeps what it found."""

    def __init__(self, chain: Chain, head: ChainPlace | None) -> None:
        self._chain, self._wanted = chain, head
        self._first: Found | None = None
        self._last: Found | None = None
        self._has_head = head is None
        self.problem: str | None = None

    def over(self, file: Path) -> Iterator[Found]:
        """The good lines, up to the first bad one."""
        for found in checked(file, self._chain):
            if found.problem is not None:
                place = None if self._last is None else self._last.place
                line = "the first line" if place is None else f"the line behind record {place.seq}"
                self.problem = f"{found.file}:{found.number}: {line} {found.problem}"
                return
            self._first, self._last = self._first or found, found
            self._has_head = self._has_head or found.place == self._wanted
            yield found
        if not self._has_head and self._wanted is not None:
            self.problem = (
                f"{file}: record {self._wanted.seq} is missing or another one: the log was cut off or rewritten"
            )

    def tell(self, file: Path, *, is_asked: bool) -> None:
        """Print what was found: the problem on stderr, or that there is none if that `is_asked`."""
        if self.problem is not None:
            print(self.problem, file=sys.stderr)  # noqa: T201
        first, last = self._first, self._last
        if first is None or last is None or first.place is None or last.place is None or not is_asked:
            return
        whole = "the chain is whole" if self.problem is None else "good until there"
        span = f"records {first.place.seq} to {last.place.seq}, {first.record.get('at')} to {last.record.get('at')}"
        print(f"{file}: {whole}: {span}")  # noqa: T201
        print(f"  the last is {last.place.seq}:{last.place.seal}")  # noqa: T201
        if first.place.seq > 1:
            print(f"  records 1 to {first.place.seq - 1} are in files that are gone")  # noqa: T201


def _print(records: Iterator[dict[str, Any]], format: str) -> None:  # noqa: A002 - as the option
    lines: Iterator[str]
    if format == "json":
        lines = (msgspec.json.encode(record).decode() + "\n" for record in records)
    elif format == "csv":
        lines = as_csv(records)
    else:
        lines = joined(("number  time (UTC)                event     what\n",), map(_line, records))
    for line in lines:
        sys.stdout.write(line)


def _line(record: dict[str, Any]) -> str:
    return f"{record['seq']:>6}  {record['at']:<24}  {record['event']:<8}  {_what(record)}\n"


def _what(record: dict[str, Any]) -> str:
    """What happened, in one line."""
    if record["event"] == "call":
        by = f"{record.get('name')} ({record.get('role')}, {record.get('by')}) from {record.get('address') or '?'}"
        asked = f" {msgspec.json.encode(record['asked']).decode()}" if record.get("asked") else ""
        return f"{by}: {record.get('call', '').partition(' ')[0]} {record.get('path')}{asked}: {record.get('status')}"
    if record["event"] == "refused":
        return f"{record.get('count')} at {record.get('port')} from {record.get('address')}: {record.get('reason')}"
    usual = {"seq", "prev", "at", "router", "event", "sha256", "hmac"}
    more = ", ".join(f"{name} {value}" for name, value in record.items() if name not in usual)
    return f"{record.get('router')}{f': {more}' if more else ''}"


def _secret(file: Path | None) -> bytes | None:
    if file is None:
        return os.environ[SECRET].encode() if SECRET in os.environ else None
    try:
        return file.read_text().strip().encode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the secret cannot be read: {error}", hint="name the file of audit.secret") from error
