"""How deep each bit goes: masks that only lose bits with depth, searched instead of walked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Falls = list[tuple[int, int]]
"""(depth, bits), depths ascending: these bits are set at the first `depth` places and not at the next."""


def search(mask_at: Callable[[int], int], count: int) -> Falls:
    """How deep each bit of `mask_at(0)` goes, up to `count`, if a bit that is gone does not come back.

    Halves only those stretches whose ends differ: about log2(count / n) looks for each of n different depths. Where a
    bit does come back, it is believed to go no further than some place that has it.
    """
    falls: Falls = []
    low, alive = 0, mask_at(0)
    ends = [(count - 1, mask_at(count - 1))] if alive else []
    while ends:
        high, mask = ends[-1]
        mask &= alive
        if mask == alive:
            low = high
            ends.pop()
        elif high == low + 1:
            falls.append((high, alive ^ mask))
            low, alive = high, mask
            ends.pop()
            if not alive:
                break
        else:
            middle = (low + high) // 2
            ends.append((middle, mask_at(middle)))
    if alive:
        falls.append((count, alive))
    return falls


def walk(masks: Iterable[tuple[int, int]], alive: int, count: int) -> Falls:
    """How deep each bit of `alive` goes, up to `count`. `masks` are (place, mask) wherever the mask may change."""
    falls: Falls = []
    for place, mask in masks:
        lost = alive & ~mask
        if lost:
            falls.append((place, lost))
            alive ^= lost
            if not alive:
                break
    if alive:
        falls.append((count, alive))
    return falls
