"""How deep each bit goes: masks that only lose bits with depth, searched instead of walked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

Falls = list[tuple[int, int]]
"""(depth, bits), depths ascending: these bits are set at the first `depth` places and not at the next."""

Masks = Mapping[int, int] | Sequence[int]
"""The mask of each set, by its number."""


def search(set_at: Callable[[int], int], masks: Masks, blocks: Sequence[int], *, count: int, wanted: int) -> Falls:
    """How deep each bit of `wanted` goes, up to `count`, if a bit that is gone does not come back.

    `set_at` gives the number of the set at a place, and `blocks` how many blocks each set has anywhere: no farther can
    one go, and one that is only in this prompt goes just so far. It costs two looks then, else it is halved: only
    those stretches whose ends differ, about log2(count / n) looks for each of n different depths. Where a bit does come
    back, it is believed to go no further than some place that has it.
    """
    falls: Falls = []
    own = set_at(0)
    low, alive, guess = 0, masks[own] & wanted, min(blocks[own] - 1 or 1, count - 1)
    # the nearest place behind `low` that is known to have less; `ends` are those behind it, the nearest last
    high, rest, other = count, 0, 0
    ends: list[tuple[int, int, int]] = []
    while alive:
        if high - low > 1:
            middle = guess if low < guess < high else (low + high) // 2
            seen = set_at(middle)
            if seen != own and (mask := masks[seen] & alive) != alive:
                ends.append((high, rest, other))
                high, rest, other = middle, mask, seen
            else:
                low = middle
                guess = guess + (middle == guess) if seen == own else middle + (blocks[seen] - 1 or 1)
                own = seen
        else:
            falls.append((high, alive ^ rest))
            low, alive, own, guess = high, rest, other, high + (blocks[other] - 1 or 1)
            while ends:
                high, rest, other = ends.pop()
                rest &= alive
                if rest != alive:
                    break
                low = high
                if own != other:
                    own, guess = other, high + (blocks[other] - 1 or 1)
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
