"""Which of an engine's cache groups decides. Engines keep one for each kind of attention that a model has."""

from __future__ import annotations

from collections.abc import Iterator

from backends.events.nouns import CacheEvent, Cleared, Stored


class DecidingGroup:
    """Lets pass what the group that sees furthest back says, and drops what the others say.

    Groups with a short window hold only the end of a prompt; a prefix is found again if the group that sees all of it
    holds it. Which one that is shows as blocks are stored; while a wider one shows up, what was known is cleared.
    Without a `group` an event concerns the whole cache.
    """

    def __init__(self) -> None:
        self._group: int | None = None
        self._window: int | None = 0

    def __repr__(self) -> str:
        return f"<DecidingGroup {self._group}, window {self._window}>"

    def admit(self, event: CacheEvent) -> Iterator[CacheEvent]:
        """What `event` means for the whole cache; nothing if another group decides."""
        if isinstance(event, Cleared) or event.group is None or event.group == self._group:
            yield event
        elif isinstance(event, Stored) and self._is_wider(event.window):
            if self._group is not None:
                yield Cleared()
            self._group, self._window = event.group, event.window
            yield event

    def _is_wider(self, window: int | None) -> bool:
        if self._group is None:
            return window != 0
        return self._window is not None and (window is None or window > self._window)
