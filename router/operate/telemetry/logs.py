"""The log: sentences on a terminal, or one JSON object a line for programs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from router.inert import inert, inert_line
from router.protocols.http.access_log import ACCESS
from shards.logs import STARTED, TEXT, JsonLines, LogFields


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Format of the log, whether it has every decision and outcome, and whether it has every request over HTTP."""

    as_json: bool = False
    verbose: bool = False
    access: bool = False


class InertLines(logging.Formatter):
    """A line for each record, whatever text of others it has, and its traceback if any."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as its base
        """The message of `record` on one line."""
        return inert_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as its base
        """A traceback."""
        return inert(super().formatException(ei))


class ConsoleLines(logging.Handler):
    """A line of the console for each record, above bars that it shows; a terminal breaks the line where it must."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line of `record`."""
        try:
            style = "red" if record.levelno >= logging.ERROR else None
            self._console.print(self.format(record), style=style, highlight=False, soft_wrap=True)
        except Exception:  # noqa: BLE001 - as every handler: a log that cannot be written ends nothing
            self.handleError(record)


class Notices:
    """What a program tells the person that has started it: lines of the console; with `as_json` of the log."""

    def __init__(self, console: Console, *, as_json: bool = False) -> None:
        self.console, self.as_json = console, as_json

    def __repr__(self) -> str:
        return f"<Notices {'as JSON' if self.as_json else 'as text'}>"

    def show(self, *lines: str, **values: Any) -> None:
        """Print `lines` as one piece; in the log they are `values`, and the first line is their message."""
        if self.as_json:
            logging.getLogger(STARTED).info(LogFields({"message": lines[0].strip(), **values}))
        else:
            # unbroken, so that a terminal breaks lines where they can be copied whole
            self.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def log_to(console: Console, options: LogOptions) -> Notices:
    """Log to `console`, one line with its time for each record; or to standard error as JSON lines."""
    if options.as_json:
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
    else:
        handler = ConsoleLines(console)
        handler.setFormatter(InertLines(TEXT))
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, handlers=[handler])
    # operators want to see that their change of the file took effect, and where the audit log ended
    for name in ("pointsman.config", "pointsman.audit", STARTED):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger(ACCESS).setLevel(logging.INFO if options.access else logging.WARNING)
    return Notices(console, as_json=options.as_json)
