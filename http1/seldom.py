"""How often something may be logged that clients can cause as often as they like."""

from __future__ import annotations

from collections.abc import Callable


class Seldom:
    """Counts occurrences, and gives the count at most once in `every_s` for each kind. `clock` is in seconds."""

    def __init__(self, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s, self._clock = every_s, clock
        self._counts: dict[str, int] = {}
        self._due_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Seldom {self._counts}>"

    def count(self, kind: str) -> int | None:
        """One more of `kind` happened: how many since the last time that a number was given, or None before its time.

        Kinds are few: each is remembered.
        """
        self._counts[kind] = counted = self._counts.get(kind, 0) + 1
        if (now := self._clock()) < self._due_at.get(kind, now):
            return None
        self._due_at[kind], self._counts[kind] = now + self._every_s, 0
        return counted
