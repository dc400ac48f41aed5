"""CapacityModel: how much a cache keeps that tells nobody, learnt from what it had and what it had not."""

from __future__ import annotations

import math

_SHARPNESS = 4.0
"""How suddenly hits become misses around the capacity: at half of it 94 % hit, at twice 6 %."""

_STEP = 0.35
"""How far one observation that could not be more surprising moves the logarithm of the capacity."""

_LEAST_BLOCKS, _MOST_BLOCKS = 8.0, 2.0**26


class CapacityModel:
    """Believes in a least-recently-used cache of some capacity: what was used `distance` blocks ago is a hit with
    P = 1 / (1 + (distance / capacity) ** 4).

    `observe` moves the logarithm of the capacity along the gradient of the observation's likelihood, so that one step
    undoes another of equal surprise, and a capacity that changes is followed.
    """

    def __init__(self, blocks: float) -> None:
        self._log = math.log(min(max(blocks, _LEAST_BLOCKS), _MOST_BLOCKS))

    def __repr__(self) -> str:
        return f"<CapacityModel {self.blocks:.0f} blocks>"

    @property
    def blocks(self) -> float:
        """The capacity, where a hit is as likely as a miss."""
        return math.exp(self._log)

    def p_hit(self, distance: float) -> float:
        """How likely a block is there when `distance` others were added or used after it."""
        if distance <= 0:
            return 1.0
        return 1.0 / (1.0 + math.exp(min(_SHARPNESS * (math.log(distance) - self._log), 700.0)))

    def observe(self, distance: float, *, hit: bool, weight: float = 1.0) -> None:
        """A block at `distance` was there, or was not; `weight` in [0, 1] is how sure that is."""
        surprise = float(hit) - self.p_hit(distance)
        log = self._log + _STEP * weight * surprise
        self._log = min(max(log, math.log(_LEAST_BLOCKS)), math.log(_MOST_BLOCKS))
