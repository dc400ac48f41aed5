"""The operator's settings of a pool. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

USUAL_PIN_SHARE = 0.25


def usual_pin_share(blocks: int, *, context_blocks: int) -> float:
    """The default share of a pool of `blocks` that pins may keep: a quarter, or less, so that every prompt that fits
    without pins also fits beside them.
    """
    return max(0.0, min(USUAL_PIN_SHARE, 1 - context_blocks / blocks))


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Settings that override the order of eviction, and the cost of recomputing.

    `pin_share`: largest share of the pool that pins may keep; 0 disables pins. `floors`: by cache domain, the number
    of its cached blocks that other domains cannot evict. `doubling_tokens`: the position at which a token costs twice
    as much to compute as the first one.
    """

    pin_share: float = 0.0
    floors: Mapping[str, int] = field(default_factory=dict)
    doubling_tokens: int = 27_000

    def guaranteed(self, size: int) -> int:
        """The number of `size` blocks that pins and floors cannot keep. Raises ValueError if there is none."""
        if not 0 <= self.pin_share < 1 or min(self.floors.values(), default=0) < 0 or self.doubling_tokens < 1:
            raise ValueError(f"pin_share must be in [0, 1), floors 0 or more, doubling_tokens 1 or more: {self}")
        left = size - int(self.pin_share * size) - sum(self.floors.values())
        if left < 1:
            raise ValueError(f"pins and floors would keep back all {size} blocks; enlarge the pool, or lower them")
        return left
