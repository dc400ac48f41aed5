"""Python's garbage collector in a process that is a router."""

from __future__ import annotations

import gc

NEW_OBJECTS = 10_000
"""More objects made than freed before the young are looked at; Python's 700 are one call in seven."""


def spare_what_stays() -> None:
    """Let the collector look no more at what there is by now, and less often at what is new; for a router that started.

    Code and parts are a few hundred thousand objects that stay as long as the process, and each full collection goes
    through them: 130 ms, during which nothing else runs. Calls leave hardly any cycles behind. What is made from now on
    is collected as before.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
