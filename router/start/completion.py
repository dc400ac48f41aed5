"""Completion in the shell: what Typer's answer to zsh loses is put back."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO

_ASKED = ("_POINTSMAN_COMPLETE", "complete_zsh")

_DOUBLED = re.compile(r"(?<!\\)''")
"""An apostrophe as Typer 0.29 writes it between single quotes, where zsh drops it."""


@contextmanager
def whole_descriptions(environment: Mapping[str, str]) -> Iterator[None]:
    """Descriptions that are printed meanwhile for zsh have their apostrophes. Nothing is changed for other shells."""
    name, asked = _ASKED
    if environment.get(name) != asked:
        yield
        return
    answer = StringIO()
    try:
        with redirect_stdout(answer):
            yield
    finally:
        sys.stdout.write(_DOUBLED.sub(r"'\\''", answer.getvalue()))
