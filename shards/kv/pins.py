"""Which cached blocks must stay, for whom, and until when. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from shards.kv.prefix import CachedBlock, PrefixCache

MOST_PINS = 4096
"""Pins that there may be at once: they are kept by name, and nobody is trusted to end what he began."""

_MOST_ENDS = 2 * MOST_PINS
"""Ends that are remembered: also those of pins that were prolonged or ended before."""


@dataclass(slots=True)
class _Pin:
    """One pin: until when, and its blocks, each with its parent."""

    until_s: float
    blocks: set[CachedBlock] = field(default_factory=set)


class Pins:
    """Pins by name, on at most `most` blocks of `prefix`; a block stays until the last pin on it has ended.

    A pin on a block is one on its parent too, so that a prefix stays whole. `settle` is called with each block on which
    the first pin began, or the last one ended.
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
        """How many more blocks may be pinned."""
        return self.most - len(self)

    @property
    def next_end_s(self) -> float | None:
        """When to `expire` next, at the latest; None if there is no pin."""
        return self._ends[0][0] if self._ends else None

    def pin(self, name: str, keys: Iterable[int], *, domain: str, until_s: float, now_s: float) -> int:
        """How many of the blocks that `keys` name, and all before them, the pin `name` now keeps until `until_s`.

        Stops at the first that is not cached in `domain`, and where there is no room. What the pin has already it keeps
        as long, or longer.
        """
        self.expire(now_s)
        if until_s <= now_s:
            return 0
        if name in self._pins:
            self._prolong(name, until_s)
        pinned = 0
        for key in keys:
            cached = self._prefix.named(key, domain=domain)
            if cached is None or not all(self._hold(name, one, until_s) for one in self._missing(name, cached)):
                break
            pinned += 1
        return pinned

    def unpin(self, name: str) -> int:
        """End the pin `name`, if there is one; how many blocks nobody pins any more."""
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
        """End the pins whose time is over at `now_s`. Without it they stay, within their share."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, name = heappop(self._ends)
            if name in self._pins and self._pins[name].until_s == until_s:
                self.unpin(name)

    def discard(self, cached: CachedBlock) -> None:
        """`cached`, no child of which is pinned, is about to be cached nowhere: no pin has it any more."""
        for name in self._names.pop(cached, ()):
            self._pins[name].blocks.discard(cached)

    def check(self) -> None:
        """Prove that there are not too many, that parents are pinned where children are, and that each pin ends."""
        assert len(self) <= self.most, "too many blocks are pinned"
        assert len(self._pins) <= MOST_PINS, "there are too many pins"
        assert len(self._ends) <= _MOST_ENDS, "ends of pins that are no more are kept"
        names: dict[CachedBlock, set[str]] = {}
        ends = set(self._ends)
        for name, pin in self._pins.items():
            assert (pin.until_s, name) in ends, "a pin never ends"
            for cached in pin.blocks:
                assert cached in self._prefix, "a pinned block was evicted"
                assert cached.parent is None or cached.parent in pin.blocks, "a pin has a child without its parent"
                names.setdefault(cached, set()).add(name)
        assert names == self._names, "a block does not know who pins it"

    def _missing(self, name: str, cached: CachedBlock) -> list[CachedBlock]:
        """Of `cached` and all before it, first to last, what the pin `name` does not have yet."""
        had = self._pins[name].blocks if name in self._pins else ()
        path: list[CachedBlock] = []
        one: CachedBlock | None = cached
        while one is not None and one not in had:
            path.append(one)
            one = one.parent
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
