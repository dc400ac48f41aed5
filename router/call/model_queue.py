"""What waits for the backends of one model."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from policies.fairness.queue import FairQueue
from policies.learning.drain_rate import DrainRate
from policies.nouns import ClusterView, Decision
from policies.waiting import is_outage, would_take
from router.call.bid import Bid


@dataclass(eq=False, slots=True)
class ModelQueue:
    """What waits for one model: in `fair` their order, with the bids in it, and those of each shape, oldest first.

    `stuck` are shapes that found no room in a walk, `reserved` the backends that somebody waits for who has waited so
    long that nobody may pass. `passed` are shapes that had a look behind many stuck ones, until all had one.
    `outages` are the shapes that wait for a backend to be well, and since when.
    """

    fair: FairQueue
    bids: dict[str, Bid] = field(default_factory=dict)
    shapes: dict[Hashable, dict[str, Bid]] = field(default_factory=dict)
    stuck: set[Hashable] = field(default_factory=set)
    reserved: set[str] = field(default_factory=set)
    passed: set[Hashable] = field(default_factory=set)
    outages: dict[Hashable, float] = field(default_factory=dict)
    rate: DrainRate = field(default_factory=DrainRate)
    walk: asyncio.TimerHandle | None = None

    def decide(self, bid: Bid, *, all_backends: bool = False) -> tuple[ClusterView, Decision, bool]:
        """What the policy decides for `bid`, at best for a backend that is reserved for nobody; does it choose one that
        is?
        """
        view, decision = bid.decide(bid.request, bid.avoiding, all_backends=all_backends)
        if decision.chosen is None or decision.chosen not in self.reserved:
            return view, decision, False
        other, elsewhere = bid.decide(bid.request, bid.avoiding | self.reserved, all_backends=all_backends)
        return (view, decision, True) if elsewhere.chosen is None else (other, elsewhere, False)

    def in_turn(self, now: float, most: int) -> Iterator[Bid]:
        """`most` of those that wait, in fair order; behind these the oldest of each shape that is not stuck.

        So whoever stands behind a crowd that waits for other room is looked at too. Some may come twice.
        """
        for ticket in islice(self.fair.order(now), most):
            yield self.bids[ticket.id]
        if len(self.bids) > most:
            for shape, bids in self.shapes.items():
                if shape not in self.stuck:
                    yield next(iter(bids.values()))

    def enter(self, bid: Bid, now: float) -> None:
        """`bid`, which just found no room, waits: at its place, or in front if its backend failed."""
        if bid.is_charged:
            self.fair.push_front(bid.ticket())
        else:
            self.fair.push(bid.ticket(), now)
        self.bids[bid.request.id] = bid
        self.shapes.setdefault(bid.shape, {})[bid.request.id] = bid

    def leave(self, bid: Bid) -> None:
        """`bid`, whose ticket has left the queue, waits no longer."""
        del self.bids[bid.request.id]
        del self.shapes[bid.shape][bid.request.id]
        if not self.shapes[bid.shape]:
            del self.shapes[bid.shape]
            self.passed.discard(bid.shape)
            self.outages.pop(bid.shape, None)

    def looked(self, bid: Bid, view: ClusterView, decision: Decision, now: float) -> None:
        """`bid`, which waits, found at `now` that it has to wait on, for room or for somebody to be well."""
        if is_outage(decision):
            self.outages.setdefault(bid.shape, now)
            # nobody works anything off, which says nothing of how fast the queue empties
            self.rate.waited(now, 0)
        else:
            self.outages.pop(bid.shape, None)
            self.rate.waited(now, len(would_take(view, decision)))

    def patience_s(self, bid: Bid, now: float, outage_s: float) -> float:
        """For how many seconds from `now` on `bid` may wait, at the least, before an outage has lasted too long for it.

        That is `outage_s` after its begin or after the bid's arrival, or after its first failure where there was one,
        and always up to the deadline of its class.
        """
        since = self.outages.get(bid.shape)
        if since is None:
            return outage_s
        # who fails again and again waits no longer than who failed once
        began_at = max(since, bid.arrived_at) if bid.failed_at is None else bid.failed_at
        deadline_s = bid.service_class.deadline_s or 0.0
        return max(began_at + outage_s, bid.arrived_at + deadline_s) - now

    def all_stuck(self) -> bool:
        """Has every shape that waits found no room?"""
        return self.shapes.keys() <= self.stuck
