"""Bars that show how far the reading of a log is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from router.terminal import inert_console

_REDRAWN_EVERY = 1000


class BarSteps:
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
def progress() -> Iterator[Progress]:
    """Bars on standard error, if that is a terminal; they leave nothing behind."""
    console = inert_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield bars


def size_of(path: Path) -> int:
    """The bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0
