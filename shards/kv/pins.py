"""Which cached blocks must stay, and until when. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from shards.kv.prefix import CachedBlock


class Pins:
    """At most `most` cached blocks that stay until their time has come; a pinned block's parent stays as long."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._until_s: dict[CachedBlock, float] = {}
        self._expiries: list[tuple[float, int, CachedBlock]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, cached: CachedBlock) -> bool:
        return cached in self._until_s

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._until_s)

    def __repr__(self) -> str:
        return f"Pins({len(self)} of {self.most})"

    def holds_until(self, cached: CachedBlock, until_s: float) -> bool:
        """Is `cached` pinned until `until_s` or for longer?"""
        return self._until_s.get(cached, float("-inf")) >= until_s

    def hold(self, cached: CachedBlock, until_s: float) -> bool:
        """Pin `cached`, whose parent is, until `until_s` or as long as it is already; False if there is no room."""
        if cached not in self._until_s and len(self) >= self.most:
            return False
        if not self.holds_until(cached, until_s):
            self._until_s[cached] = until_s
            self._pushed += 1
            heappush(self._expiries, (until_s, self._pushed, cached))
        return True

    def expire(self, now_s: float) -> list[CachedBlock]:
        """The blocks whose time is over at `now_s`; they are pinned no more."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now_s:
            until_s, _, cached = heappop(self._expiries)
            if self._until_s.get(cached) == until_s:
                del self._until_s[cached]
                expired.append(cached)
        return expired

    def discard(self, cached: CachedBlock) -> None:
        """Unpin `cached`, if it is pinned."""
        self._until_s.pop(cached, None)

    def clear(self) -> None:
        """Unpin all."""
        self._until_s.clear()
        self._expiries.clear()

    def check(self) -> None:
        """Prove that there are not too many, and that parents stay as long as their children."""
        assert len(self) <= self.most, "too many blocks are pinned"
        for cached, until_s in self._until_s.items():
            if cached.parent is not None:
                assert self.holds_until(cached.parent, until_s), "a parent is pinned for less long"
        waiting = {(until_s, cached) for until_s, _, cached in self._expiries}
        assert all((until_s, cached) in waiting for cached, until_s in self._until_s.items()), "a pin never expires"
