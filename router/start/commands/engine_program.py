"""`pointsman shard` and `quantize`: this process becomes a program of our own engine, which imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from router.start.commands.local_shards import shard_environment
from router.start.preflight import require_engine

PROGRAMS = {"shard": "shards", "quantize": "shards.quant"}
"""Command -> module."""


def become(program: str, arguments: Sequence[str]) -> NoReturn:
    """Run the module `program`, with the environment that torch needs from its start. Raises ConfigError without torch.

    Help needs no torch, so this process prints it.
    """
    if {"-h", "--help"} & {*arguments}:
        (name,) = (command for command, module in PROGRAMS.items() if module == program)
        app_of(program)(args=["--help"], prog_name=f"pointsman {name}")
    require_engine()
    command = [sys.executable, "-P", "-m", program, *arguments]
    os.execve(sys.executable, command, shard_environment(os.environ))  # noqa: S606  # nosec B606


def app_of(program: str) -> Any:
    """The command line of the module `program`, a Typer; imports no torch."""
    return import_module(f"{program}.__main__").app
