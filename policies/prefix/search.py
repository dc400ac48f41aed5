"""Depth of each bit in masks that only lose bits with depth, found by bisection instead of a walk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

Falls = list[tuple[int, int]]
"""(depth, bits), in ascending depth: these bits are set at the first `depth` places and not at the next."""

Masks = Mapping[int, int] | Sequence[int]
"""The mask of each set, by its number."""


def search(set_at: Callable[[int], int], masks: Masks, blocks: Sequence[int], *, count: int, wanted: int) -> Falls:
    """The depth of each bit of `wanted`, up to `count`, if a lost bit does not come back.

    `set_at` returns the number of the set at a place, and `blocks` how many blocks each set has anywhere: a stretch of
    a set is at most that long, and exactly that long if the set occurs only in this prompt. Then it costs two probes.
    Otherwise stretches with different ends are bisected: about log2(count / n) probes for each of n different depths.
    If a bit does come back, the result is at most some place that has it.
    """
    falls: Falls = []
    own = set_at(0)
    low, alive, guess = 0, masks[own] & wanted, min(blocks[own] - 1 or 1, count - 1)
    # the nearest place behind `low` that is known to have fewer bits; `ends` are those behind it, the nearest last
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
    """The depth of each bit of `alive`, up to `count`. `masks` are (place, mask) wherever the mask may change."""
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
