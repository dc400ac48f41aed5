"""Consoles of rich: only their own codes reach the terminal, and the texts that they show are inert."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from router.inert import ACTIVE, InertStream, inert


def inert_console(*, stderr: bool = False, file: Any = None, **options: Any) -> Console:
    """A console without markup, to standard output unless told otherwise."""
    stream = file or (sys.stderr if stderr else sys.stdout)
    if isinstance(stream, InertStream):
        # it would take the console's own codes for those of others
        file = stream.plain
    return _InertConsole(file=file, stderr=stderr, markup=False, emoji=False, **options)


class _InertConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """As it is measured and as it is shown."""
        return super().render_str(inert(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What Text and others hold too."""
        for segment in super().render(renderable, options):
            is_inert = segment.control or not ACTIVE.search(segment.text)
            yield segment if is_inert else Segment(inert(segment.text), segment.style)
