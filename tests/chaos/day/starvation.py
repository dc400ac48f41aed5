"""How long programs wait for a CPU: one that gets none looks dead, and is well."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

WITHIN_S, STARVED_S = 12.0, 3.0
"""A part is starved if one of its threads waited for so long within such a time: after 3 s without a sign of life a
shard counts as ill."""

Part = tuple[str, int]


def waited_s(pid: int) -> dict[int, float]:
    """Seconds that each thread of a process was ready to run and had no CPU, since it began (proc(5), schedstat)."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError, ValueError):
            found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


@dataclass
class Starvation:
    """Looks again and again how long the threads of parts waited."""

    _last: dict[Part, dict[int, float]] = field(default_factory=dict)
    _waited: list[tuple[float, Part, float]] = field(default_factory=list)

    def look(self, part: Part, pid: int) -> None:
        """Note how long the threads of `part` waited since the last look."""
        last, now = self._last.get(part, {}), waited_s(pid)
        self._last[part] = now
        longest = max((waited - last[thread] for thread, waited in now.items() if thread in last), default=0.0)
        self._waited.append((time.monotonic(), part, longest))

    def is_starved(self, parts: set[Part], at_s: float) -> bool:
        """Did one of `parts` wait for long in the time before `at_s`?"""
        waited = dict.fromkeys(parts, 0.0)
        for seen_s, part, longest in self._waited:
            if part in waited and at_s - WITHIN_S <= seen_s <= at_s + 1.0:
                waited[part] += longest
        return max(waited.values()) > STARVED_S
