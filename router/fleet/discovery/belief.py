"""What is believed of a source: what it said last, but an empty answer only after a while. Pure."""

from __future__ import annotations

from router.fleet.discovery.source import Addresses


class Belief:
    """The set of addresses that a source is believed to have; `now` is in seconds of one clock.

    A name server that restarts, or a watch that begins anew, may say for a moment that there is nobody; that must not
    empty a cluster. So an empty set counts once it has been true for `patience_s`, and a failure begins that anew.
    """

    def __init__(self, patience_s: float) -> None:
        self.addresses: Addresses = frozenset()
        self._patience_s = patience_s
        self._empty_since: float | None = None

    def __repr__(self) -> str:
        doubt = "" if self._empty_since is None else ", said to be empty"
        return f"<Belief in {len(self.addresses)} addresses{doubt}>"

    @property
    def due_at(self) -> float | None:
        """When an empty answer will be believed; None if there is none in doubt."""
        return None if self._empty_since is None else self._empty_since + self._patience_s

    def hear(self, told: Addresses, now: float) -> None:
        """The source said `told`."""
        if told:
            self.addresses, self._empty_since = told, None
        elif self.addresses and self._empty_since is None:
            self._empty_since = now
        self.settle(now)

    def fail(self) -> None:
        """The source could not be asked."""
        self._empty_since = None

    def settle(self, now: float) -> None:
        """Believe that it is empty if it was so for long enough."""
        if self.due_at is not None and now >= self.due_at:
            self.addresses, self._empty_since = frozenset(), None
