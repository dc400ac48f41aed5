"""Pinned blocks: their names, and when each pin ends. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from shards.kv.prefix import CachedBlock, PrefixCache

MOST_PINS = 4096
"""The most pins at a time: they are kept by name, and their owners may never end them."""

_MOST_ENDS = 2 * MOST_PINS
"""The most ends that are remembered, including those of pins that were extended or ended early."""


@dataclass(slots=True)
class _Pin:
    """One pin: its end, and its blocks, each with its parent."""

    until_s: float
    blocks: set[CachedBlock] = field(default_factory=set)


class Pins:
    """Pins by name, on at most `most` blocks of `prefix`; a block stays until the last pin on it has ended.

    A pin on a block also pins its parent, so that a prefix stays whole. `settle` is called with each block after
    its first pin began, or its last pin ended.
    """

    def __init__(self, most: int, prefix: PrefixCache, settle: Callable[[CachedBlock], None]) -> None:
        self.most = most
        self._prefix, self._settle = prefix, settle
        self._pins: dict[str, _Pin] = {}
        self._names: dict[CachedBlock, set[str]] = {}
        self._ends: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, cached: CachedBlock) -> bool:
        return cached in self._names

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._names)

    def __repr__(self) -> str:
        return f"Pins({len(self._pins)} on {len(self)} of {self.most} blocks)"

    @property
    def room(self) -> int:
        """The number of blocks that can still be pinned."""
        return self.most - len(self)

    @property
    def next_end_s(self) -> float | None:
        """The latest time of the next `expire`; None if there is no pin."""
        return self._ends[0][0] if self._ends else None

    def pin(self, name: str, keys: Iterable[int], *, domain: str, until_s: float, now_s: float) -> int:
        """Keep the blocks of `keys`, and all before them, in the pin `name` until `until_s`; returns the number kept.

        Stops at the first key that is not cached in `domain`, and when there is no room. Blocks that the pin already
        has are kept as long, or longer.
        """
        self.expire(now_s)
        if until_s <= now_s:
            return 0
        if name in self._pins:
            self._prolong(name, until_s)
        pinned = 0
        for key in keys:
            cached = self._prefix.of_tenant(key, domain=domain)
            if cached is None or not all(self._hold(name, block, until_s) for block in self._missing(name, cached)):
                break
            pinned += 1
        return pinned

    def unpin(self, name: str) -> int:
        """End the pin `name`, if it exists; returns the number of blocks that no pin holds any more."""
        pin = self._pins.pop(name, None)
        loose = 0
        for cached in pin.blocks if pin is not None else ():
            self._names[cached].discard(name)
            if not self._names[cached]:
                del self._names[cached]
                self._settle(cached)
                loose += 1
        return loose

    def expire(self, now_s: float) -> None:
        """End the pins that are due at `now_s`. Until this call they stay, within their share."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, name = heappop(self._ends)
            if name in self._pins and self._pins[name].until_s == until_s:
                self.unpin(name)

    def discard(self, cached: CachedBlock) -> None:
        """Remove `cached`, which has no pinned children and is about to leave the cache, from all pins."""
        for name in self._names.pop(cached, ()):
            self._pins[name].blocks.discard(cached)

    def check(self) -> None:
        """Assert that there are not too many pins, that parents of pinned blocks are pinned, and that each pin ends."""
        assert len(self) <= self.most, "too many blocks are pinned"
        assert len(self._pins) <= MOST_PINS, "there are too many pins"
        assert len(self._ends) <= _MOST_ENDS, "too many ends of former pins are kept"
        names: dict[CachedBlock, set[str]] = {}
        ends = set(self._ends)
        for name, pin in self._pins.items():
            assert (pin.until_s, name) in ends, "a pin never ends"
            for cached in pin.blocks:
                assert cached in self._prefix, "a pinned block was evicted"
                assert cached.parent is None or cached.parent in pin.blocks, "a pin has a child without its parent"
                names.setdefault(cached, set()).add(name)
        assert names == self._names, "a block does not list its pins"

    def _missing(self, name: str, cached: CachedBlock) -> list[CachedBlock]:
        """The blocks of the prefix that ends with `cached`, first to last, that the pin `name` does not have yet."""
        had = self._pins[name].blocks if name in self._pins else ()
        path: list[CachedBlock] = []
        block: CachedBlock | None = cached
        while block is not None and block not in had:
            path.append(block)
            block = block.parent
        return path[::-1]

    def _hold(self, name: str, cached: CachedBlock, until_s: float) -> bool:
        """Add `cached` to the pin `name`; False if there is no room."""
        is_new = cached not in self._names
        if (is_new and not self.room) or (name not in self._pins and len(self._pins) >= MOST_PINS):
            return False
        if name not in self._pins:
            self._prolong(name, until_s)
        self._pins[name].blocks.add(cached)
        self._names.setdefault(cached, set()).add(name)
        if is_new:
            self._settle(cached)
        return True

    def _prolong(self, name: str, until_s: float) -> None:
        pin = self._pins.setdefault(name, _Pin(float("-inf")))
        if pin.until_s < until_s:
            pin.until_s = until_s
            heappush(self._ends, (until_s, name))
        if len(self._ends) > _MOST_ENDS:
            self._ends = [(pin.until_s, name) for name, pin in self._pins.items()]
            heapify(self._ends)
