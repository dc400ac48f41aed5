"""Chooses the cache group for the index. Engines keep one group for each kind of attention of a model."""

from __future__ import annotations

from collections.abc import Iterator

from backends.events.nouns import CacheEvent, Cleared, Stored


class DecidingGroup:
    """Passes the events of the group with the widest window, and drops those of the others.

    Groups with a short window hold only the end of a prompt; a cached prefix is usable if the group with the widest
    window holds it. Stored blocks show which one that is; when a wider one appears, the known blocks are cleared.
    An event without a `group` concerns the whole cache.
    """

    def __init__(self) -> None:
        self._group: int | None = None
        self._window: int | None = 0

    def __repr__(self) -> str:
        return f"<DecidingGroup {self._group}, window {self._window}>"

    def admit(self, event: CacheEvent) -> Iterator[CacheEvent]:
        """The events for the whole cache; none if another group counts."""
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
