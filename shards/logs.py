"""Log lines, of shards and of routers: one for each event with its time, as text or as JSON."""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

AS_JSON = "POINTSMAN_JSON_LOGS"
"""The environment variable by which a process tells those that it starts that logs are JSON."""

STARTED = "pointsman.start"
"""The logger of what a program tells the person that has started it."""

TEXT = "%(asctime)s %(levelname)s %(message)s"


class LogFields:
    """Named values as the message of a log record; its text is their JSON."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __str__(self) -> str:
        return encoded(self.values)


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
        return encoded(line)


def encoded(values: dict[str, Any]) -> str:
    """`values` as JSON on one line; those without a form of it as text."""
    return msgspec.json.encode(values, enc_hook=str).decode()


def log_to_stderr(*, as_json: bool) -> None:
    """Log warnings and errors to standard error: the log of a shard."""
    if as_json:
        # for processes that this one starts
        os.environ[AS_JSON] = "1"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger(STARTED).setLevel(logging.INFO)


def tell(sentence: str, level: int = logging.INFO) -> None:
    """Print `sentence` on standard error for a person, or log it there where the log is JSON."""
    if any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers):
        logging.getLogger(STARTED).log(level, "%s", sentence)
    else:
        print(sentence, file=sys.stderr, flush=True)  # noqa: T201
