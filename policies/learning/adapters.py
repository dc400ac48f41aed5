"""The LoRA adapters that one backend has ready, and the time to make another one ready. Pure.

An engine keeps a few adapters in slots beside the model, and evicts the least recently used. Other known adapters
are in its host memory; adapters that it loads on demand come from a disk or a network.
Source: vLLM documentation, "LoRA Adapters" (`max_loras`, dynamic loading, resolvers).
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Collection

USUAL_SLOTS = 1
"""Slots of a backend that does not report them: vLLM's default."""

_WEIGHT = 0.3
"""Weight of the newest observation."""

_MOST_RECENT = 64
"""Adapters that are remembered per backend; no engine has so many slots."""

_LONGEST_S = 60.0
"""The largest value of an observation, so that one outlier does not keep an adapter away from a backend."""


class Readiness(enum.StrEnum):
    """The work before a backend can serve an adapter. A word in explanations."""

    READY = "ready"
    """None: the adapter is in a slot."""

    KNOWN = "known"
    """Putting the adapter into a slot."""

    NO_SLOT = "no_slot"
    """Waiting: all slots are in use by requests of other adapters, one of which must end."""

    LOADS = "loads"
    """Loading the adapter."""


PRIOR_S = {Readiness.READY: 0.0, Readiness.KNOWN: 0.05, Readiness.NO_SLOT: 1.0, Readiness.LOADS: 1.0}
"""Estimated seconds before any observation."""


class AdapterSlots:
    """State of one backend's adapters, by the names that clients use.

    Adapters in use are in its slots, and the last used ones in the remaining slots. The cost of each Readiness
    is learned from how much later than predicted the first token came.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._in_use: Counter[str] = Counter()
        self._seconds = dict(PRIOR_S)

    def __repr__(self) -> str:
        return f"<AdapterSlots {', '.join(self._recent) or 'unused'}>"

    def readiness(
        self,
        adapter: str,
        *,
        is_known: bool,
        active: Collection[str] | None,
        slots: int | None,
        ready: Collection[str] | None = None,
    ) -> Readiness:
        """The work before the backend can serve `adapter`.

        `is_known`: the backend lists it. `active` are the adapters with requests by the backend's report, None if it
        reports none. It has `slots` slots. `ready` are those in its memory, if it reports that; it loads all others.
        """
        if ready is not None:
            return self._of_reported(adapter, ready, active or (), slots or USUAL_SLOTS)
        if adapter in self._in_use or (active is not None and adapter in active):
            return Readiness.READY
        if not is_known:
            return Readiness.LOADS
        in_use = self._in_use.keys() | (active or ())
        free = (slots or USUAL_SLOTS) - len(in_use)
        if free <= 0:
            return Readiness.NO_SLOT
        idle = [name for name in self._recent if name not in in_use]
        return Readiness.READY if adapter in idle[-free:] else Readiness.KNOWN

    def _of_reported(self, adapter: str, ready: Collection[str], active: Collection[str], slots: int) -> Readiness:
        # requests that were sent a moment ago are in no report yet
        if adapter in ready or adapter in self._in_use:
            return Readiness.READY
        in_use = self._in_use.keys() | active
        return Readiness.LOADS if len(in_use) < slots else Readiness.NO_SLOT

    def seconds(self, readiness: Readiness) -> float:
        """Seconds until the adapter is ready."""
        return self._seconds[readiness]

    def begin(self, adapter: str) -> None:
        """Record that a request of `adapter` goes there."""
        self._in_use[adapter] += 1
        self._touch(adapter)

    def end(self, adapter: str) -> None:
        """It is over."""
        self._in_use[adapter] -= 1
        if not self._in_use[adapter]:
            del self._in_use[adapter]
            self._touch(adapter)

    def observe(self, readiness: Readiness, late_s: float) -> None:
        """Record that a first token came `late_s` later than predicted without an adapter."""
        if readiness is not Readiness.READY:
            known = self._seconds[readiness]
            self._seconds[readiness] = known + _WEIGHT * (min(max(0.0, late_s), _LONGEST_S) - known)

    def forget(self) -> None:
        """Forget all adapters: the backend may have restarted with empty slots."""
        self._recent.clear()

    def check(self) -> None:
        """Assert that nothing is counted twice."""
        assert all(count > 0 for count in self._in_use.values()), f"{self!r}: an adapter is in use by nothing"
        assert len(self._recent) <= _MOST_RECENT, f"{self!r} remembers too many"

    def _touch(self, adapter: str) -> None:
        self._recent[adapter] = None
        self._recent.move_to_end(adapter)
        while len(self._recent) > _MOST_RECENT:
            self._recent.popitem(last=False)
