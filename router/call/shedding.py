"""Load shedding: while the event loop is late, each tenant runs at most its share of the calls that it can carry.

Source: additive increase and multiplicative decrease, as TCP's congestion control has it (Chiu and Jain, Analysis of
the increase and decrease algorithms, 1989), on the delay of a queue that never empties, as CoDel has it (RFC 8289).
"""

from __future__ import annotations

from collections.abc import Callable

from policies.errors import Overloaded
from router.call.admission import Admission

LATE_S = 0.1
"""A loop that is later than this twice in a row has more work than time: one halt alone is a pause."""

LEAST_CALLS = 64
"""So few calls do not keep the loop busy for that long, so the cause is another one and they are never refused."""

DECREASE, INCREASE = 0.7, 1.1
"""What the bound is multiplied with, at each look, while the loop is late and while it is not."""

_RETRY_AFTER_S = 1.0


class Shedding:
    """Bounds the calls of `admission` while the event loop is late, and refuses tenants that have their share of them.

    A router with more requests than its core can handle would keep all of them waiting, longer and longer: each has a
    step of work in each turn of the loop. It refuses some instead, before it reads their bodies. Calls of tenants with
    fewer than their equal share are taken, so that a flood of one does not close the router to others.

    `on_event` gets `shedding` each time that it begins.
    """

    def __init__(self, admission: Admission, *, on_event: Callable[[str], None] = lambda _: None) -> None:
        self._admission, self._on_event = admission, on_event
        self._was_late = False
        self._bound: float | None = None
        self.share: int | None = None
        """Most calls of one tenant that may run; None: there is no such bound. Read for every call."""

    def __repr__(self) -> str:
        return f"<Shedding {'nothing' if self.share is None else f'calls beyond {self.share} of a tenant'}>"

    def looked(self, late_s: float) -> None:
        """The event loop was `late_s` late just now; comes some times a second."""
        is_late, self._was_late = self._was_late and late_s > LATE_S, late_s > LATE_S
        if self._bound is None and not is_late:
            return
        running, tenants = self._admission.crowd()
        if is_late:
            if self._bound is None and running > LEAST_CALLS:
                self._on_event("shedding")
            self._bound = max(LEAST_CALLS, DECREASE * min(running, self._bound or running))
        else:
            assert self._bound is not None, "only a bound can grow"
            self._bound *= INCREASE
            if self._bound > 2 * running + LEAST_CALLS:
                self._bound = None
        self.share = None if self._bound is None else max(1, int(self._bound / max(1, tenants)))

    def refuse_beyond_share(self, tenant: str) -> None:
        """Raises Overloaded if `tenant` runs its share of the calls already."""
        if self.share is not None and self._admission.running(tenant) >= self.share:
            hint = "try again in a moment, or add routers or processes"
            raise Overloaded("the router has more requests than it can handle", hint=hint, retry_after_s=_RETRY_AFTER_S)
