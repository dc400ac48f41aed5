"""HolderSets: each different set of holders once, under a small number."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

NO_HOLDERS = 0
"""The number of the empty set."""

_RECORD_BYTES = 200
"""Memory of a set besides its mask: an entry in a dict and in two lists, and the integers in them (CPython 3.11)."""

_SWEPT_AT_ONCE = 256


class HolderSets:
    """Bit masks by number, with a count of the blocks that have them. Blocks with equal holders share one mask.

    `masks` and `counts` are for readers; an unused number has a mask and a count of 0.

    At most `most` sets, and at most `max_bytes` of them besides those of one bit. `retire` removes bits from all
    sets a few at a time, so until `sweep` has passed a mask may still have some: readers remove them themselves.
    Numbers with masks that have become empty, or equal to others, are stale; `renewed` gives the replacement.
    """

    def __init__(self, max_bytes: int, most: int) -> None:
        self.masks = [0]
        self.counts = [1]
        self._numbers = {0: NO_HOLDERS}
        self._free: list[int] = []
        self._max_bytes, self._most = max_bytes, most
        self._bytes = 0
        self._retired = self._sweeping = 0
        self._swept = 0
        self._stale: set[int] = set()
        self.stale_blocks = 0

    def __len__(self) -> int:
        """Sets in use, including the empty one."""
        return len(self.masks) - len(self._free)

    def __repr__(self) -> str:
        return f"<HolderSets {len(self)} sets, {self._bytes} of {self._max_bytes} bytes>"

    def size_bytes(self) -> int:
        """Approximate memory of the sets."""
        return self._bytes

    def number(self, mask: int) -> int | None:
        """The number of `mask`; None if it is new and there is no room for it. Valid until the next `move`."""
        known = self._numbers.get(mask)
        if known is not None:
            return known
        if mask & (mask - 1) and (self._bytes >= self._max_bytes or len(self) >= self._most):
            return None
        if self._free:
            number = self._free.pop()
            self.masks[number] = mask
        else:
            number = len(self.masks)
            self.masks.append(mask)
            self.counts.append(0)
        self._numbers[mask] = number
        self._bytes += _bytes_of(mask)
        return number

    def move(self, old: int, new: int, blocks: int = 1) -> None:
        """Record that `blocks` blocks changed from set `old` to `new`. A set without blocks is forgotten."""
        counts = self.counts
        if new:
            counts[new] += blocks
            if new in self._stale:
                self.stale_blocks += blocks
        if old:
            counts[old] -= blocks
            if old in self._stale:
                self.stale_blocks -= blocks
            if not counts[old]:
                self._forget(old)

    def renewed(self, number: int) -> int:
        """The number to use instead of `number`: the same if no other has its mask any more."""
        use = self._numbers.setdefault(self.masks[number], number)
        self._mark(number, is_stale=use != number)
        return use

    def release(self, numbers: Iterable[int]) -> None:
        """Record that the blocks with these sets, one each, are gone."""
        for number, blocks in Counter(numbers).items():
            self.move(number, NO_HOLDERS, blocks)

    def blocks_of(self, mask: int) -> int:
        """Number of blocks with a set that has any bit of `mask`."""
        return sum(count for held, count in zip(self.masks, self.counts, strict=True) if held & mask)

    def retire(self, bits: int) -> None:
        """Remove `bits` from every set over time; no mask that is added from now on has any of them."""
        self._retired |= bits

    def sweep(self) -> int:
        """Remove retired bits from the next few sets; returns the bits that are now in none."""
        if not self._sweeping:
            if not self._retired:
                return 0
            self._sweeping, self._retired, self._swept = self._retired, 0, 0
        end = min(self._swept + _SWEPT_AT_ONCE, len(self.masks))
        for number in range(self._swept, end):
            if self.masks[number] & self._sweeping:
                self._replace(number, self.masks[number] & ~self._sweeping)
        self._swept = end
        if end < len(self.masks):
            return 0
        clean, self._sweeping = self._sweeping, 0
        return clean

    def check(self) -> None:
        """Assert that masks, numbers and bytes agree, and that no set lingers."""
        free = set(self._free)
        assert len(free) == len(self._free), "a number is free twice"
        for number, mask in enumerate(self.masks[1:], start=1):
            assert (number in free) == (self.counts[number] == 0), "a set without blocks lingers, or one is lost"
            assert number not in free or not mask, "a free number has a mask"
        assert all(self.masks[number] == mask for mask, number in self._numbers.items()), "a mask has a wrong number"
        assert self.stale_blocks == sum(self.counts[number] for number in self._stale), "stale blocks are miscounted"
        assert all(
            number in self._stale or self._numbers.get(self.masks[number]) == number
            for number in range(1, len(self.masks))
            if number not in free
        ), "a stale set is not marked as stale"
        used = [mask for number, mask in enumerate(self.masks) if number and number not in free]
        assert self._bytes == sum(map(_bytes_of, used)), "bytes are miscounted"

    def _forget(self, number: int) -> None:
        mask = self.masks[number]
        if mask and self._numbers.get(mask) == number:
            del self._numbers[mask]
        self._bytes -= _bytes_of(mask)
        self._stale.discard(number)
        self.masks[number] = 0
        self._free.append(number)

    def _replace(self, number: int, mask: int) -> None:
        old = self.masks[number]
        if self._numbers.get(old) == number:
            del self._numbers[old]
        self.masks[number] = mask
        self._mark(number, is_stale=self._numbers.setdefault(mask, number) != number)
        self._bytes += _bytes_of(mask) - _bytes_of(old)

    def _mark(self, number: int, *, is_stale: bool) -> None:
        if is_stale != (number in self._stale):
            self._stale ^= {number}
            self.stale_blocks += self.counts[number] if is_stale else -self.counts[number]


def _bytes_of(mask: int) -> int:
    return sys.getsizeof(mask) + _RECORD_BYTES
