"""`pointsman config`: the SLA file of a running router, through its admin port."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from backends.nesting import decode_json
from policies.errors import InvalidRequest
from policies.sla.difference import difference
from router.operate.admin_port import AdminPort
from router.operate.config_desk import Applied, DraftReport, Listed
from router.regular_file import read_regular

T = TypeVar("T")

_BASE = "/admin/config"
_TIMEOUT_S = 30.0


class ConfigCommands:
    """The commands, at the router behind `port`. Each returns lines for people and raises ExpectedError."""

    def __init__(self, port: AdminPort) -> None:
        self._port = port

    def __repr__(self) -> str:
        return f"<ConfigCommands at {self._port!r}>"

    def draft(self, file: Path) -> tuple[DraftReport, list[str]]:
        """Upload `file` as a draft: the report, and its lines."""
        report = self._read(DraftReport, f"{_BASE}/drafts", "POST", body=text_of(file).encode())
        return report, list(lines_of(report))

    def apply(self, version: str, *, expected: str | None, for_restart: bool) -> str:
        """Have a draft in effect."""
        path = f"{_BASE}/drafts/{version}/apply{'?restart=true' if for_restart else ''}"
        return _sentence(self._read(Applied, path, "POST", expected=expected))

    def roll_back(self, version: str | None, *, for_restart: bool) -> str:
        """Have an earlier version in effect; None: the last one."""
        body = msgspec.json.encode({} if version is None else {"version": version})
        path = f"{_BASE}/rollback{'?restart=true' if for_restart else ''}"
        return _sentence(self._read(Applied, path, "POST", body=body))

    def history(self) -> list[str]:
        """Drafts and earlier versions."""
        drafts = self._read(dict[str, list[Listed]], f"{_BASE}/drafts")["drafts"]
        versions = self._read(dict[str, list[Listed]], f"{_BASE}/history")["versions"]
        lines = [f"draft    {each.version}  came {_at(each.at)}" for each in drafts]
        lines += [f"earlier  {each.version}  until {_at(each.at)}" for each in versions]
        return lines or ["no draft, and no earlier version is kept"]

    def show(self, version: str | None) -> str:
        """The text of the file; of a draft or an earlier version, if `version` names one."""
        if version is None:
            return self._port.call(f"{_BASE}/file").decode()
        drafts = self._read(dict[str, list[Listed]], f"{_BASE}/drafts")["drafts"]
        is_draft = any(each.version == version for each in drafts)
        return self._port.call(f"{_BASE}/drafts/{version}/text" if is_draft else f"{_BASE}/history/{version}").decode()

    def _read(
        self, kind: type[T], path: str, method: str = "GET", *, body: bytes | None = None, expected: str | None = None
    ) -> T:
        headers = {} if expected is None else {"If-Match": f'"{expected}"'}
        answer = self._port.call(path, method, body=body, headers=headers, timeout_s=_TIMEOUT_S)
        try:
            return decode_json(answer, kind)
        except msgspec.DecodeError as error:
            raise self._port.no_reply(error) from error


def text_of(file: Path) -> str:
    """The text of `file`. Raises InvalidRequest."""
    try:
        return read_regular(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def compared(before: Path, after: Path) -> list[str]:
    """The changes between two files, as lines."""
    return list(map(str, difference(text_of(before), text_of(after)))) or ["no difference"]


def lines_of(report: DraftReport) -> Iterator[str]:
    """The report for people."""
    if report.problems:
        count = len(report.problems)
        yield f"draft {report.version} has {'1 mistake' if count == 1 else f'{count} mistakes'}:"
        yield from report.problems
        return
    yield f"draft {report.version} is sound; version {report.running} is in effect"
    yield from (f"warning: {doubt}" for doubt in report.warnings)
    yield from _part("changes", report.changes or ("none in meaning",))
    yield from _part("needs a restart", report.restart)
    backends = report.backends
    named = (("new", backends.start), ("replaced", backends.are_replaced), ("leaving", backends.leave))
    yield from _part("backends", [f"{what}: {', '.join(names)}" for what, names in named if names])
    yield from _part("latest requests", _sampled(report))


def _sampled(report: DraftReport) -> list[str]:
    sample = report.decisions
    if not sample.compared and not sample.unknown:
        return ["none to compare"]
    lines = [f"{sample.differ} of {sample.compared} would be decided differently"]
    lines += [f"{each.count} times {each.what}: {each.now} -> {each.then}" for each in sample.differences]
    if sample.unknown:
        lines.append(f"{sample.unknown} cannot be compared: their rules test what is not kept, such as headers")
    return lines


def _part(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"{title}:"
        yield from (f"  {line}" for line in lines)


def _sentence(applied: Applied) -> str:
    what = "is in effect" if applied.in_effect else "is in the file and takes effect at the next start"
    return f"version {applied.version} {what}; {applied.before} before"


def _at(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time).astimezone().isoformat(" ", "seconds")
