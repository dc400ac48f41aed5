"""The log: sentences for people on a terminal, or one JSON object a line for machines."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp.http_exceptions import HttpProcessingError
from rich.console import Console
from rich.logging import RichHandler


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How the log looks, and whether every decision and outcome is in it."""

    as_json: bool = False
    verbose: bool = False


class Facts:
    """Named values as the message of a log record; its text is their JSON."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __str__(self) -> str:
        return _encoded(self.values)


class JsonLines(logging.Formatter):
    """One JSON object for each record: time, level, logger, then its Facts, or its message; and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= record.msg.values if isinstance(record.msg, Facts) else {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encoded(line)


class HttpServerLog(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp's server logs. What a client sends that is no HTTP is one line, and no error of ours: a port that
    strangers reach gets much of it, and what they sent may hold a key.
    """

    def __init__(self) -> None:
        super().__init__(logging.getLogger("pointsman.http"))

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        """Log `msg` with the exception that is handled."""
        if isinstance(exc_info, HttpProcessingError):
            self.info("a client sent what is no HTTP: %s", type(exc_info).__name__)
        else:
            super().exception(msg, *args, exc_info=exc_info, **more)


def log_to(console: Console, options: LogOptions) -> None:
    """Log to `console`; a line each, with its date, where that is no terminal; or to standard error as JSON lines."""
    if options.as_json:
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
    elif not console.is_terminal:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    else:
        handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, handlers=[handler])
    # whoever edits the file wants to see that it was taken
    logging.getLogger("pointsman.config").setLevel(logging.INFO)


def _encoded(values: dict[str, Any]) -> str:
    return msgspec.json.encode(values, enc_hook=str).decode()
