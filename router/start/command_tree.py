"""The whole command line as a tree, for pages and tests: every command with its options and its help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from router.start.cli import app
from router.start.commands.engine_program import PROGRAMS, app_of


def command_tree() -> dict[tuple[str, ...], Any]:
    """Words behind `pointsman` -> the command of click; groups and `pointsman` itself, (), come before their commands.

    Hidden commands are left out.
    """
    return dict(_below((), typer.main.get_command(app)))


def _below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if len(words) == 1 and words[0] in PROGRAMS:
        command = typer.main.get_command(app_of(PROGRAMS[words[0]]))
    yield words, command
    for name, part in getattr(command, "commands", {}).items():
        if not part.hidden:
            yield from _below((*words, name), part)
