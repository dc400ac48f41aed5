"""`pointsman usage`: the usage that the routers under a file have kept, read from its database."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from rich import box
from rich.table import Table

from policies.errors import ConfigError
from policies.sla.config import Config
from router.operate.admin_port import AdminPort
from router.operate.usage.database import UsageDatabase
from router.operate.usage.report import UsageQuery, as_csv, as_focus, as_json
from router.terminal import inert_console

_TIMEOUT_S = 30.0

FORMATS = ("table", "csv", "json", "focus")

_MISSING = {"tenant": "(not identified)"}
"""What a table shows for a name that is empty; `-` for others."""

_COLUMNS = {
    "requests": "requests",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "answers",
    "cost": "cost",
}


def run(config: Config, asked: Mapping[str, str], format: str) -> None:  # noqa: A002 - as the option
    """Print the usage that is `asked` for, by the names of the admin port's parameters. Raises ExpectedError."""
    if config.usage is None:
        raise ConfigError("this file has no place for usage", hint="write usage: {store: usage.sqlite}")
    if "://" not in config.usage.store and not (folder := Path(config.usage.store).parent).is_dir():
        hint = "a router of another user or service has another one: name it with STATE_DIRECTORY or server.state"
        raise ConfigError(f"no router has kept usage in {folder}", hint=hint)
    query = UsageQuery.read(asked, now=time.time())
    database = UsageDatabase(config.usage.store)
    try:
        database.migrate()
        if format == "focus":
            sys.stdout.write(as_focus(database, query))
            return
        rows = query.answer(database)
    except ConnectionError as error:
        raise ConfigError(str(error), hint="is usage.store the one that the routers write?") from error
    finally:
        database.close()
    if format == "json":
        sys.stdout.write(as_json(rows).decode() + "\n")
    elif format == "csv":
        sys.stdout.write(as_csv(rows))
    else:
        _print(rows, query.by)


def run_at(port: AdminPort, asked: Mapping[str, str], format: str) -> None:  # noqa: A002
    """As `run`, of the running router at `port`: all that its database has, or without one its own since its start."""
    query = UsageQuery.read(asked, now=time.time())
    path = {"csv": "usage.csv", "focus": "usage.focus.csv"}.get(format, "usage")
    answer = port.call(f"/admin/{path}?{urlencode(asked)}", timeout_s=_TIMEOUT_S)
    if format in ("csv", "focus"):
        sys.stdout.write(answer.decode())
        return
    try:
        found = msgspec.json.decode(answer)
        rows = [{"currency": "", **row} for row in found["usage"]]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError) as error:
        raise port.no_reply(error) from error
    if format == "json":
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    else:
        # a router without a database sums by tenant and model
        _print(rows, ("tenant", "model") if "seconds" in found else query.by)


def _print(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> None:
    # in a file or a pipe, no line is broken
    inert_console(width=None if sys.stdout.isatty() else 200).print(_table(rows, by))


def _table(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> Table | str:
    if not rows:
        return "No usage in that time."
    table = Table(box=box.SIMPLE_HEAD)
    for name in by:
        table.add_column(name.replace("_", " "), no_wrap=True)
    for name in _COLUMNS.values():
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        amounts = (f"{row[name]:,}" for name in _COLUMNS if name != "cost")
        names = (str(row[name]) or _MISSING.get(name, "-") for name in by)
        table.add_row(*names, *amounts, f"{row['cost']:,.6f} {row['currency']}".strip())
    return table
