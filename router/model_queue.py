"""What waits for the backends of one model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from policies.drain_rate import DrainRate
from policies.fairness.queue import FairQueue
from policies.nouns import ClusterView, Decision, Request
from policies.waiting import is_outage, would_take
from router.bid import Bid


@dataclass(eq=False, slots=True)
class ModelQueue:
    """What waits for one model: in `fair` their order, with the bids in it and how many there are of each shape.

    `stuck` are shapes that found no room since the last change, `hungry` the pools that somebody waits for who has
    waited so long that nobody may pass. `outages` are the shapes that wait for a backend to be well, and since when.
    """

    fair: FairQueue
    bids: dict[str, Bid] = field(default_factory=dict)
    shapes: Counter[Hashable] = field(default_factory=Counter)
    stuck: set[Hashable] = field(default_factory=set)
    hungry: list[tuple[str, ...] | None] = field(default_factory=list)
    outages: dict[Hashable, float] = field(default_factory=dict)
    rate: DrainRate = field(default_factory=DrainRate)
    walk: asyncio.TimerHandle | None = None

    def lets(self, bid: Bid) -> bool:
        """May `bid` be placed at once, without passing anybody who is to go first?"""
        if not self.bids:
            return True
        return self.walk is None and bid.shape not in self.stuck and not self.is_held_back(bid.request)

    def enter(self, bid: Bid, now: float) -> None:
        """`bid`, whose shape just found no room, waits: at its place, or in front if its backend failed."""
        if bid.is_charged:
            self.fair.push_front(bid.ticket())
        else:
            self.fair.push(bid.ticket(), now)
        self.bids[bid.request.id] = bid
        self.shapes[bid.shape] += 1
        self.stuck.add(bid.shape)

    def leave(self, bid: Bid) -> None:
        """`bid`, whose ticket has left the queue, waits no longer."""
        del self.bids[bid.request.id]
        self.shapes[bid.shape] -= 1
        if not self.shapes[bid.shape]:
            del self.shapes[bid.shape]
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

        That is `outage_s` after its begin or after the bid's arrival, and always up to the deadline of its class.
        """
        since = self.outages.get(bid.shape)
        if since is None:
            return outage_s
        deadline_s = bid.service_class.deadline_s or 0.0
        return max(max(since, bid.arrived_at) + outage_s, bid.arrived_at + deadline_s) - now

    def all_stuck(self) -> bool:
        """Has every shape that waits found no room?"""
        return self.shapes.keys() <= self.stuck

    def is_held_back(self, request: Request) -> bool:
        """Would `request` take the room that a hungry one waits for?"""
        return any(_overlap(pools, request.pools) for pools in self.hungry)


def _overlap(pools: tuple[str, ...] | None, others: tuple[str, ...] | None) -> bool:
    return pools is None or others is None or not set(pools).isdisjoint(others)
