"""CapacityModel: the size of a cache that does not report it, learned from hits and misses."""

from __future__ import annotations

import math

_SHARPNESS = 4.0
"""Sharpness of the transition from hits to misses around the capacity: at half of it 94 % hit, at twice 6 %."""

_STEP = 0.35
"""Change of the capacity's logarithm after the most surprising observation."""

_LEAST_BLOCKS, _MOST_BLOCKS = 8.0, 2.0**26


class CapacityModel:
    """Models a least-recently-used cache: a block that was used `distance` blocks ago is a hit with
    P = 1 / (1 + (distance / capacity) ** 4).

    `observe` moves the logarithm of the capacity along the gradient of the observation's likelihood. So one step
    undoes another of equal surprise, and the model follows a capacity that changes.
    """

    def __init__(self, blocks: float) -> None:
        self._log = math.log(min(max(blocks, _LEAST_BLOCKS), _MOST_BLOCKS))

    def __repr__(self) -> str:
        return f"<CapacityModel {self.blocks:.0f} blocks>"

    @property
    def blocks(self) -> float:
        """The capacity, at which a hit is as likely as a miss."""
        return math.exp(self._log)

    def p_hit(self, distance: float) -> float:
        """Probability that a block is there after `distance` others were added or used."""
        if distance <= 0:
            return 1.0
        return 1.0 / (1.0 + math.exp(min(_SHARPNESS * (math.log(distance) - self._log), 700.0)))

    def observe(self, distance: float, *, hit: bool, weight: float = 1.0) -> None:
        """Record that a block at `distance` was a hit or not; `weight` in [0, 1] is the certainty."""
        surprise = float(hit) - self.p_hit(distance)
        log = self._log + _STEP * weight * surprise
        self._log = min(max(log, math.log(_LEAST_BLOCKS)), math.log(_MOST_BLOCKS))
