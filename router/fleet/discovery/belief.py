"""The addresses that a source is believed to have: its last answer, but an empty one only after a while. Pure."""

from __future__ import annotations

from router.fleet.discovery.source import Addresses


class Belief:
    """The set of addresses that a source is believed to have; `now` is in seconds of one clock.

    A name server that restarts, or a new watch, may answer for a moment that there are no backends; that must not
    empty a cluster. So an empty set counts once it was given for `patience_s`, and a failure restarts that time.
    """

    def __init__(self, patience_s: float) -> None:
        self.addresses: Addresses = frozenset()
        self._patience_s = patience_s
        self._empty_since: float | None = None

    def __repr__(self) -> str:
        doubt = "" if self._empty_since is None else ", perhaps empty"
        return f"<Belief in {len(self.addresses)} addresses{doubt}>"

    @property
    def due_at(self) -> float | None:
        """When an empty answer will count; None if there is none."""
        return None if self._empty_since is None else self._empty_since + self._patience_s

    def hear(self, addresses: Addresses, now: float) -> None:
        """The source answered `addresses`."""
        if addresses:
            self.addresses, self._empty_since = addresses, None
        elif self.addresses and self._empty_since is None:
            self._empty_since = now
        self.settle(now)

    def fail(self) -> None:
        """The source could not be asked."""
        self._empty_since = None

    def settle(self, now: float) -> None:
        """Accept an empty answer if it is old enough."""
        if self.due_at is not None and now >= self.due_at:
            self.addresses, self._empty_since = frozenset(), None
