"""Which LoRA adapters one backend has ready, and how long it takes to make another one ready. Pure.

An engine keeps a few adapters in slots beside the model, and gives up the one that was used longest ago. Further ones
that it knows of come from its host memory, those that it loads when they are asked for from a disk or a network.
Source: vLLM documentation, "LoRA Adapters" (`max_loras`, dynamic loading, resolvers).
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Collection

USUAL_SLOTS = 1
"""Slots of a backend that does not tell: vLLM's default."""

_WEIGHT = 0.3
"""How much the newest observation counts."""

_MOST_RECENT = 64
"""Adapters that are remembered of one backend; no engine has so many slots."""

_LONGEST_S = 60.0
"""An observation counts as this at most, so that one hiccup does not keep an adapter away from a backend."""


class Readiness(enum.StrEnum):
    """What a backend has to do before it can serve an adapter. A word in explanations."""

    READY = "ready"
    """Nothing: the adapter is in a slot."""

    KNOWN = "known"
    """It puts the adapter into a slot."""

    NO_SLOT = "no_slot"
    """All slots are in use by requests of other adapters: one of these has to end."""

    LOADS = "loads"
    """It has yet to load the adapter."""


PRIOR_S = {Readiness.READY: 0.0, Readiness.KNOWN: 0.05, Readiness.NO_SLOT: 1.0, Readiness.LOADS: 1.0}
"""Seconds that this is believed to take before anything was seen."""


class AdapterSlots:
    """What is known of one backend's adapters, by the names that clients use.

    Adapters in use are in its slots, and those that were used last in the slots that are left. What each Readiness
    costs is learnt from how much later than predicted the first token came.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._in_use: Counter[str] = Counter()
        self._seconds = dict(PRIOR_S)

    def __repr__(self) -> str:
        return f"<AdapterSlots {', '.join(self._recent) or 'unused'}>"

    def readiness(
        self, adapter: str, *, is_known: bool, active: Collection[str] | None, slots: int | None
    ) -> Readiness:
        """What the backend has to do for `adapter`.

        It `is_known` if the backend lists it. `active` are those of which it says that it has requests, None where it
        does not say. It has so many `slots`.
        """
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

    def seconds(self, readiness: Readiness) -> float:
        """How long it takes until the adapter is ready."""
        return self._seconds[readiness]

    def begin(self, adapter: str) -> None:
        """A request of `adapter` goes there."""
        self._in_use[adapter] += 1
        self._touch(adapter)

    def end(self, adapter: str) -> None:
        """It is over."""
        self._in_use[adapter] -= 1
        if not self._in_use[adapter]:
            del self._in_use[adapter]
            self._touch(adapter)

    def observe(self, readiness: Readiness, late_s: float) -> None:
        """A first token came so much later than without an adapter."""
        if readiness is not Readiness.READY:
            known = self._seconds[readiness]
            self._seconds[readiness] = known + _WEIGHT * (min(max(0.0, late_s), _LONGEST_S) - known)

    def forget(self) -> None:
        """The backend may have been started anew: its slots are empty."""
        self._recent.clear()

    def check(self) -> None:
        """Prove that nothing is counted twice."""
        assert all(count > 0 for count in self._in_use.values()), f"{self!r}: an adapter is in use by nothing"
        assert len(self._recent) <= _MOST_RECENT, f"{self!r} remembers too many"

    def _touch(self, adapter: str) -> None:
        self._recent[adapter] = None
        self._recent.move_to_end(adapter)
        while len(self._recent) > _MOST_RECENT:
            self._recent.popitem(last=False)
