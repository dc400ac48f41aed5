"""Rungs: the blocks of a prompt by which it is recorded. Keys are chained, so a deep block implies all before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Rungs(NamedTuple):
    """The first `each` blocks of a prompt one by one, then the last one of every `every`: a long prompt costs little
    more than a short one, and its known length is rounded down to a rung.
    """

    each: int
    every: int

    def of(self, keys: Sequence[int]) -> Sequence[int]:
        """The keys of the rungs among the blocks `keys`."""
        if len(keys) < self.each + self.every:
            return keys[: self.each]
        return (*keys[: self.each], *keys[self.each + self.every - 1 :: self.every])

    def within(self, blocks: int) -> int:
        """The number of rungs among the first `blocks`."""
        return min(blocks, self.each) + max(0, blocks - self.each) // self.every

    def blocks(self, rungs: int) -> int:
        """The number of blocks up to and including the last of the first `rungs`."""
        return min(rungs, self.each) + max(0, rungs - self.each) * self.every
