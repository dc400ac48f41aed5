"""`pointsman diagnose`: from decision logs to text, JSON and a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from policies.errors import ConfigError
from router.operate.diagnose.diagnosis import diagnosis_of
from router.operate.diagnose.logged import USUAL_MOST, read_logs
from router.operate.diagnose.nouns import Diagnosis
from router.operate.diagnose.picture import as_svg
from router.operate.diagnose.text import as_text, shown

_REDRAWN_EVERY = 1000


@dataclass(frozen=True, slots=True)
class DiagnoseOptions:
    """The command line's options. `json` prints JSON in place of text, and `picture` is a file for an SVG."""

    logs: Sequence[Path]
    json: bool = False
    picture: Path | None = None
    cache_tokens: int | None = None
    most: int = USUAL_MOST


def run(options: DiagnoseOptions) -> None:
    """Print the diagnosis of the logs. Raises InvalidRequest, and ConfigError if the picture cannot be written."""
    with _progress() as bars:
        reading = bars.add_task("reading", total=sum(map(_size, options.logs)))
        contents = read_logs(options.logs, most=options.most, on_read=_Steps(bars, reading).advance)
        tries = sum(len(request.visits) for request in contents.requests)
        steps = _Steps(bars, bars.add_task("diagnosing", total=tries))
        diagnosis = diagnosis_of(contents, cache_tokens=options.cache_tokens, on_done=lambda: steps.advance(1))
    if options.picture is not None:
        _write(options.picture, as_svg(diagnosis))
    if options.json:
        print(as_json(diagnosis), end="")  # noqa: T201
    elif sys.stdout.isatty():
        Console().print(shown(diagnosis))
    else:
        print(as_text(diagnosis))  # noqa: T201


def as_json(diagnosis: Diagnosis) -> str:
    """`diagnosis` as JSON."""
    return msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode() + "\n"


class _Steps:
    """Moves one bar, and only now and then."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task
        self._calls = 0
        self._since = 0

    def advance(self, amount: int) -> None:
        """So much more is done."""
        self._calls += 1
        self._since += amount
        if self._calls % _REDRAWN_EVERY == 0:
            self._bars.advance(self._task, self._since)
            self._since = 0


@contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on standard error, if that is a terminal; they leave nothing behind."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield bars


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _write(path: Path, svg: str) -> None:
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="choose another file with --picture"
        ) from error
