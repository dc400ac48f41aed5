"""The log: sentences on a terminal, or one JSON object a line for programs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.logging import RichHandler

from router.inert import inert, inert_line


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Format of the log, and whether it has every decision and outcome."""

    as_json: bool = False
    verbose: bool = False


class LogFields:
    """Named values as the message of a log record; its text is their JSON."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __str__(self) -> str:
        return _encoded(self.values)


class InertLines(logging.Formatter):
    """A line for each record, whatever text of others it has, and its traceback if any."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as its base
        """The message of `record` on one line."""
        return inert_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - as its base
        """A traceback."""
        return inert(super().formatException(ei))


class JsonLines(logging.Formatter):
    """One JSON object for each record: time, level, logger, its LogFields or message, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`, without its newline."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= record.msg.values if isinstance(record.msg, LogFields) else {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encoded(line)


def log_to(console: Console, options: LogOptions) -> None:
    """Log to `console`, with dates if it is not a terminal; or to standard error as JSON lines."""
    if options.as_json:
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
    elif not console.is_terminal:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(InertLines("%(asctime)s %(levelname)s %(message)s"))
    else:
        handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, handlers=[handler])
    # operators want to see that their change of the file took effect, and where the audit log ended
    for name in ("pointsman.config", "pointsman.audit"):
        logging.getLogger(name).setLevel(logging.INFO)


def _encoded(values: dict[str, Any]) -> str:
    return msgspec.json.encode(values, enc_hook=str).decode()
