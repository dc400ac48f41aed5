"""What the operator decides about a pool. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

USUAL_PIN_SHARE = 0.25


def usual_pin_share(blocks: int, *, context_blocks: int) -> float:
    """What pins may keep of a pool of so many blocks where nobody says: a quarter, but never so much that a prompt of
    the whole context would not fit any more that did without.
    """
    return max(0.0, min(USUAL_PIN_SHARE, 1 - context_blocks / blocks))


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What may stay in the cache against the order of eviction, and what recomputing costs.

    `pin_share`: the most of the pool that pins may keep; 0 means that nothing can be pinned. `floors`: so many cached
    blocks of a cache domain others cannot evict. `doubling_tokens`: the position at which a token costs twice as much
    to compute as the first one.
    """

    pin_share: float = 0.0
    floors: Mapping[str, int] = field(default_factory=dict)
    doubling_tokens: int = 27_000

    def guaranteed(self, size: int) -> int:
        """How many of `size` blocks neither pins nor floors can keep back. Raises ValueError if there is none."""
        if not 0 <= self.pin_share < 1 or min(self.floors.values(), default=0) < 0 or self.doubling_tokens < 1:
            raise ValueError(f"pin_share must be in [0, 1), floors 0 or more, doubling_tokens 1 or more: {self}")
        left = size - int(self.pin_share * size) - sum(self.floors.values())
        if left < 1:
            raise ValueError(f"pins and floors would keep back all {size} blocks; give the pool more, or them less")
        return left
