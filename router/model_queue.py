"""What waits for the backends of one model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from policies.drain_rate import DrainRate
from policies.fairness.queue import FairQueue
from policies.nouns import Request
from router.bid import Bid


@dataclass(eq=False, slots=True)
class ModelQueue:
    """What waits for one model: in `fair` their order, with the bids in it and how many there are of each shape.

    `stuck` are shapes that found no room since the last change, `hungry` the pools that somebody waits for who has
    waited so long that nobody may pass.
    """

    fair: FairQueue
    bids: dict[str, Bid] = field(default_factory=dict)
    shapes: Counter[Hashable] = field(default_factory=Counter)
    stuck: set[Hashable] = field(default_factory=set)
    hungry: list[tuple[str, ...] | None] = field(default_factory=list)
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

    def all_stuck(self) -> bool:
        """Has every shape that waits found no room?"""
        return self.shapes.keys() <= self.stuck

    def is_held_back(self, request: Request) -> bool:
        """Would `request` take the room that a hungry one waits for?"""
        return any(_overlap(pools, request.pools) for pools in self.hungry)


def _overlap(pools: tuple[str, ...] | None, others: tuple[str, ...] | None) -> bool:
    return pools is None or others is None or not set(pools).isdisjoint(others)
